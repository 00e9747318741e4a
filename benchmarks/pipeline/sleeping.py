"""Stages that sleep, on more ranks than cores: what the executor itself takes, and whether plans come true."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import nn

from dovetail.coordinator.loop.stored_schedule import StoredSchedule, encode
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import ModelPipelines, ScheduleProblem, SearchEffort
from dovetail.planner.training_schedule import choose_schedule, rank_actions, shared_layouts
from dovetail.protocol.plan import Layout, stages_at
from dovetail.trainer.engine.executor import Executor, MicroBatch, Pipe
from dovetail.trainer.groups import Groups
from dovetail.trainer.packed_batches import Sequences
from pipeline import torch_zbv

# Of the placements that are tried: whether the critic's stages run against the actor's, stages of a model on a rank.
FAMILIES = {
    (True, 1): ("serial", "overlapped", "fused", "fused-rolled", "fused-split"),
    (False, 1): ("stitched",),
    (False, 2): ("zb-v", "v-half", "v-min"),
    (True, 2): ("fused-v", "fused-v-rolled", "fused-v-whole"),
    (True, 4): ("fused-w",),
}
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

    def __init__(self, rank: int, size: int, chunks: int, forward: float) -> None:
        super().__init__()
        self._last = size * chunks - 1
        self.stages = stages_at(rank, size, chunks)
        self.is_first, self.is_last = 0 in self.stages, self._last in self.stages
        self.seconds = forward
        self.weight = nn.Parameter(torch.ones(chunks, WIDTH))
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
    rows: dict[str, Any] = {}
    for (reverse, chunks), names in FAMILIES.items():
        layouts = {n: x.model_copy(update={"chunks": chunks}) for n, x in shared_layouts(plain, reverse).items()}
        for name, layout in layouts.items():
            groups.place(name, layout)
        problem = _problem(settings, layouts)
        lists = None
        if rank == 0:
            effort = SearchEffort(20.0, time.monotonic, workers=1, scale=0.1, memory=False)
            choice = choose_schedule(problem, names, effort, reverse, chunks)
            lists = {n: (s.makespan, encode(rank_actions(s, layouts))) for n, s in choice.schedules.items()}
        for name, (predicted, words) in groups.broadcast_json(lists).items():
            mine = StoredSchedule(name, settings["mini_batches"], words).actions()[rank]
            rows[name] = {"predicted": predicted, "actions": len(mine), "seconds": []}
            for _ in range(settings["repeats"]):
                rows[name]["seconds"].append(_once(groups, layouts, mine, settings))
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


def _problem(settings: dict[str, Any], layouts: dict[str, Layout]) -> ScheduleProblem:
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


def _once(groups: Groups, layouts: dict[str, Layout], actions: Any, settings: dict[str, Any]) -> float:
    one = Sequences(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    packed = one.pack([0], torch.ones(1, 1, dtype=torch.bool))
    pipes = {}
    for name in layouts:
        held = groups.of(name)
        forward = settings["unit"] * (1 if name == "actor" else settings["ratio"]) / held.chunks
        stage: Any = SleepingStage(held.pp_rank, held.pp_size, held.chunks, forward)
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
    return time.perf_counter() - start
