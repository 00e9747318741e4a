"""Stages that sleep, on more ranks than cores: what the executor itself takes, and whether plans come true.

Plans are made as jobs make them: from the times that the ranks measured of each stage's passes, and of a message."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dovetail.coordinator.schedules.stored_schedule import StoredSchedule, encode
from dovetail.coordinator.schedules.training_schedule import (
    Times,
    choose_schedule,
    rank_actions,
    shared_layouts,
    training_problem,
)
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import ModelPipelines, ScheduleProblem, SearchEffort
from dovetail.protocol.messages import Action, StageTimes
from dovetail.protocol.plan import Layout, stages_at
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine.action_measures import Collected
from dovetail.trainer.engine.executor import Executor, MicroBatch, Pipe
from dovetail.trainer.packed_batches import Sequences
from pipeline import torch_zbv

# By placement: whether the critic's stages run against the actor's, stages of a model on a rank, and whether these are
# in a loop.
FAMILIES = {
    (True, 1, False): ("serial", "fused", "fused-rolled", "fused-split"),
    (False, 1, False): ("stitched",),
    (True, 2, False): ("fused-v", "fused-v-rolled", "fused-v-whole"),
    (False, 2, False): ("zb-v", "v-half", "v-min"),
    (False, 2, True): ("interleaved",),
    (True, 4, False): ("fused-w",),
}
# Of each number of stages on a rank: schedules with both kinds of backward, whose passes are measured.
MEASURED = {1: ("serial", "fused-split"), 2: ("fused-v-whole", "fused-v"), 4: ("fused-w",)}
WIDTH = 8


class _Sleep(torch.autograd.Function):
    """The identity. Its forward and its backward pass take as long as they are told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """(1, T) tokens or (1, T, H) to (1, T, H). `forward`: seconds of a stage's forward pass; each of the gradients of
    its input and of its weight takes as long. `chunks`: as `dovetail.models.PipelineStage` has them."""

    hidden_size = WIDTH

    def __init__(self, rank: int, size: int, chunks: int, forward: float, loop: bool = False) -> None:
        super().__init__()
        self._last = size * chunks - 1
        self.stages = stages_at(rank, size, chunks, loop)
        self.is_first, self.is_last = 0 in self.stages, self._last in self.stages
        self.seconds = forward
        self.weight = nn.Parameter(torch.ones(chunks, WIDTH))
        self.chunk_layers: list[list[int]] = [[] for _ in self.stages]
        self.body = nn.Module()
        self.body.layers = nn.ModuleDict()

    def begins(self, chunk: int = 0) -> bool:
        return self.stages[chunk] == 0

    def ends(self, chunk: int = 0) -> bool:
        return self.stages[chunk] == self._last

    def forward(self, inputs: torch.Tensor, *_: Any, chunk: int = 0, **__: Any) -> torch.Tensor:
        begins = self.begins(chunk)
        hidden = inputs[..., None].expand(-1, -1, WIDTH).float() if begins else inputs
        # The first stage's input has no gradient: its weight's takes the time of both.
        weight = _Sleep.apply(self.weight[chunk], 0.0, (2 if begins else 1) * self.seconds)
        found: torch.Tensor = _Sleep.apply(hidden, self.seconds, self.seconds) * weight
        return found


def run(rank: int, world: int, port: int, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`: unit (seconds of the actor's forward), ratio (critic to actor), micro_batches, mini_batches,
    repeats. Seconds measured and predicted by family."""
    plain = {m: Parallelism(pp=world) for m in ("actor", "critic")}
    groups = Groups.form("127.0.0.1", port, rank, world, dict(plain), 900.0)
    counts = dict.fromkeys(plain, settings["micro_batches"])
    rows: dict[str, Any] = {}
    times, latency = Times(), 0.0
    for (reverse, chunks, loop), names in FAMILIES.items():
        layouts = shared_layouts(plain, reverse, chunks, loop)
        for name, layout in layouts.items():
            groups.place(name, layout)
        if reverse:
            latency = latency or _latency(groups)
            times = Times()
            for _, actions in _plan(groups, _nominal(settings, layouts), MEASURED[chunks], layouts).values():
                seen = Collected()
                for _ in range(2):  # the first run meets what nobody has used yet
                    seen = Collected()
                    _once(groups, layouts, actions, settings, seen)
                parts = groups.share_json([part.model_dump(mode="json") for part in seen.take(rank)])
                times.add([StageTimes.model_validate(part) for mine in parts for part in mine], layouts)
        problem = training_problem(layouts, counts, settings["mini_batches"], times, communication=latency)
        for name, (predicted, actions) in _plan(groups, problem, names, layouts).items():
            seconds = [_once(groups, layouts, actions, settings) for _ in range(settings["repeats"])]
            rows[name] = {"predicted": predicted, "actions": len(actions), "seconds": seconds}
    rows["zb-v, torch's ZBV"] = {
        "predicted": rows["zb-v"]["predicted"],
        "actions": rows["zb-v"]["actions"],
        "seconds": _torch_zbv(groups, rank, world, settings),
    }
    groups.close()
    return rows


def _torch_zbv(groups: Groups, rank: int, world: int, settings: dict[str, Any]) -> list[float]:
    """Seconds of the same stages on torch's ZB-V, one model after the other, without a barrier between."""
    count = settings["micro_batches"]
    tokens = torch.ones(count, 1, dtype=torch.int64)
    schedules = []
    for forward in (settings["unit"], settings["unit"] * settings["ratio"]):

        def make(stage: int, seconds: float = forward / 2) -> nn.Module:
            return SleepingStage(stage, 2 * world, 1, seconds)

        shape = torch.Size((1, 1, WIDTH))
        schedules.append(torch_zbv.zb_v(make, rank, world, tokens[:1], shape, count, lambda output, _: output.sum()))
    found = []
    for _ in range(settings["repeats"] + 1):
        groups.barrier()
        start = time.perf_counter()
        for _ in range(settings["mini_batches"]):
            for schedule in schedules:
                torch_zbv.step(schedule, rank, tokens)
        groups.barrier()
        found.append(time.perf_counter() - start)
    return found[1:]  # the first makes the communicators


def _plan(
    groups: Groups, problem: ScheduleProblem, names: tuple[str, ...], layouts: dict[str, Layout]
) -> dict[str, tuple[float, list[Action]]]:
    """By family: predicted seconds, and this rank's actions. Rank 0's search is for all: searches may end unlike."""
    found = None
    if groups.rank == 0:
        effort = SearchEffort(20.0, time.monotonic, workers=1, scale=0.1, memory=False)
        layout = layouts["critic"]
        schedules = choose_schedule(problem, names, effort, layout.reverse, layout.chunks, layout.loop).schedules
        found = {name: (s.makespan, encode(rank_actions(s, layouts))) for name, s in schedules.items()}
    return {
        name: (predicted, StoredSchedule(name, problem.mini_batches, words).actions()[groups.rank])
        for name, (predicted, words) in groups.broadcast_json(found).items()
    }


def _latency(groups: Groups) -> float:
    """Seconds of a message from rank 0 to rank 1."""
    edge, tensor, seconds = groups.of("actor").edges[0], torch.zeros(1, 1, WIDTH), []
    for _ in range(12):
        start = time.perf_counter()
        if groups.rank == 0:
            dist.send(tensor, 1, group=edge.forward_out)
            dist.recv(tensor, 1, group=edge.backward_in)
        elif groups.rank == 1:
            dist.recv(tensor, 0, group=edge.forward_in)
            dist.send(tensor, 0, group=edge.backward_out)
        seconds.append((time.perf_counter() - start) / 2)
    return float(groups.broadcast_json(statistics.median(seconds[2:])))


def _nominal(settings: dict[str, Any], layouts: dict[str, Layout]) -> ScheduleProblem:
    """What the stages are told to sleep: for the schedules that are measured."""
    count, unit = settings["micro_batches"], settings["unit"]

    def model(name: str, forward: float) -> ModelPipelines:
        pp, chunks = layouts[name].pp, layouts[name].chunks
        share = np.full((pp * chunks, 1), 0.5)
        share[0] = 1e-6
        both = 2 * forward / chunks
        halves = both * share, both * (1 - share)
        return ModelPipelines(name, pp, count, forward / chunks, both, forward / chunks, 1, *halves, parts=chunks)

    return ScheduleProblem(
        (model("actor", unit), model("critic", unit * settings["ratio"])), 0.0, settings["mini_batches"]
    )


def _once(
    groups: Groups,
    layouts: dict[str, Layout],
    actions: list[Action],
    settings: dict[str, Any],
    seen: Collected | None = None,
) -> float:
    """Wall seconds of all mini-batches. `seen` gets the times of the passes."""
    one = Sequences(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    packed = one.pack([0], torch.ones(1, 1, dtype=torch.bool))
    pipes = {}
    for name in layouts:
        held = groups.of(name)
        forward = settings["unit"] * (1 if name == "actor" else settings["ratio"]) / held.chunks
        stage: Any = SleepingStage(held.pp_rank, held.pp_size, held.chunks, forward, layouts[name].loop)
        total = settings["micro_batches"] * settings["mini_batches"]
        batches = [MicroBatch(packed, lambda output: (output.sum(), {})) for _ in range(total)]
        pipes[name] = Pipe(
            stage, held, batches, torch.device("cpu"), torch.float32, mini_batch=settings["micro_batches"]
        )
    executor = Executor(pipes, timedelta(seconds=60))
    groups.barrier()
    start = time.perf_counter()
    executor.run(actions)
    groups.barrier()
    took = time.perf_counter() - start
    if seen is not None:
        counts = dict.fromkeys(layouts, settings["micro_batches"])
        seen.add(executor.watch.seconds(), executor.saved_bytes, executor.peak_bytes, counts)
    return took
