"""Stages that sleep, on more ranks than cores: what the executor itself takes, and whether plans come true."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from dovetail.coordinator.loop.stored_schedule import StoredSchedule, encode
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import ModelPipelines, ScheduleProblem, SearchEffort
from dovetail.planner.training_schedule import choose_schedule, rank_actions, shared_layouts
from dovetail.protocol.plan import Layout
from dovetail.trainer.engine.executor import Executor, MicroBatch, Pipe
from dovetail.trainer.groups import Groups
from dovetail.trainer.packed_batches import Sequences

FAMILIES = ("serial", "overlapped", "stitched", "fused", "fused-rolled", "fused-split")
WIDTH = 8


class _Sleep(torch.autograd.Function):
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
    """(1, T) tokens or (1, T, H) to (1, T, H); the weight's gradient takes no time."""

    hidden_size = WIDTH

    def __init__(self, first: bool, last: bool, forward: float, backward: float) -> None:
        super().__init__()
        self.is_first, self.is_last = first, last
        self.seconds = (forward, backward)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor, *_: Any) -> torch.Tensor:
        hidden = inputs[..., None].expand(-1, -1, WIDTH).float() if self.is_first else inputs
        found: torch.Tensor = _Sleep.apply(hidden * self.weight, *self.seconds)
        return found


def run(rank: int, world: int, port: int, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`: unit (seconds of the actor's forward), ratio (critic to actor), micro_batches, mini_batches,
    repeats. Seconds measured and predicted by family."""
    plain = {m: Parallelism(pp=world) for m in ("actor", "critic")}
    groups = Groups.form("127.0.0.1", port, rank, world, dict(plain), 900.0)
    rows: dict[str, Any] = {}
    for reverse in (True, False):
        layouts = shared_layouts(plain, reverse)
        for name, layout in layouts.items():
            groups.place(name, layout)
        problem = _problem(settings, layouts)
        names = [n for n in FAMILIES if n not in rows and not n.endswith("split")]
        lists = None
        if rank == 0:
            choice = choose_schedule(problem, names, SearchEffort(workers=1, scale=0.1, memory=False), reverse)
            lists = {n: (s.makespan, encode(rank_actions(s, layouts))) for n, s in choice.schedules.items()}
        for name, (predicted, words) in groups.broadcast_json(lists).items():
            mine = StoredSchedule(name, settings["mini_batches"], words).actions()[rank]
            rows[name] = {"predicted": predicted, "actions": len(mine), "seconds": []}
            for _ in range(settings["repeats"]):
                rows[name]["seconds"].append(_once(groups, layouts, mine, settings))
    groups.close()
    return rows


def _problem(settings: dict[str, Any], layouts: dict[str, Layout]) -> ScheduleProblem:
    count, unit = settings["micro_batches"], settings["unit"]

    def model(name: str, forward: float) -> ModelPipelines:
        return ModelPipelines(name, layouts[name].pp, count, forward, 2 * forward, forward)

    return ScheduleProblem(
        (model("actor", unit), model("critic", unit * settings["ratio"])), 0.0, settings["mini_batches"]
    )


def _once(groups: Groups, layouts: dict[str, Layout], actions: Any, settings: dict[str, Any]) -> float:
    one = Sequences(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    packed = one.pack([0], torch.ones(1, 1, dtype=torch.bool))
    pipes = {}
    for name in layouts:
        held = groups.of(name)
        forward = settings["unit"] * (1 if name == "actor" else settings["ratio"])
        stage: Any = SleepingStage(held.pp_rank == 0, held.pp_rank == held.pp_size - 1, forward, 2 * forward)
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
