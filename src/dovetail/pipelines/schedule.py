"""Defines a schedule: the orders of passes on all ranks, their times and their memory. Writes it as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dovetail.pipelines.bound import lower_bound
from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.simulate import KINDS, Floats, Ints, order_peak, run_orders


class Pass(NamedTuple):
    """One forward (F), backward (B), input gradient (I) or weight gradient (W) on a rank. `micro_batch` counts through
    all mini-batches."""

    rank: int
    model: str
    pipeline: int
    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Schedule:
    """Orders (N, length) and the times and memory that `simulate` computes for them.

    `finish`: the ends of passes, in the shape of `SearchInstance.duration`. `peaks` (N,): the peak activation memory of
    each rank. `how`: the method that found the schedule. `proved`: no schedule of the family within the problem's
    memory limit has a shorter makespan than this number."""

    family: str
    instance: SearchInstance
    orders: Ints
    finish: Floats
    makespan: float
    peaks: Floats
    how: str = "rule"
    seed: int = 0
    seconds: float = 0.0
    proved: float = 0.0

    @property
    def peak(self) -> float:
        return float(self.peaks.max())

    @property
    def bound(self) -> float:
        """The family's lower bound on the makespan, or what was proved beyond it."""
        return max(lower_bound(self.instance), self.proved)

    @property
    def at_bound(self) -> bool:
        return self.makespan <= self.bound * (1 + 1e-9)

    def fits(self, limit: float | None) -> bool:
        """Whether no rank holds more activations than `limit`."""
        return limit is None or self.peak <= limit * (1 + 1e-9)

    def passes(self) -> Iterator[Pass]:
        """Every rank's passes in their order."""
        i, models = self.instance, self.instance.problem.models
        for rank in range(i.ranks):
            count = [0] * (KINDS * len(i.total))
            for code in (int(code) for code in self.orders[rank] if code >= 0):
                chunk, kind, q = code // KINDS, code % KINDS, count[code]
                count[code] += 1
                m = models[chunk // i.placement.chunks]
                end = float(self.finish[chunk, kind, rank, q])
                pipeline, stage = m.ranks.index(rank) // m.stages, int(i.position[chunk, rank])
                letter = ("FIW" if i.split else "FB")[kind]
                start = end - float(i.duration[chunk, kind, rank, q])
                yield Pass(rank, m.name, pipeline, stage, q, letter, start, end)


class DeadlockError(ValueError):
    """The orders of passes never finish."""


def evaluate(instance: SearchInstance, orders: Ints, family: str = "", how: str = "rule") -> Schedule:
    """The schedule of these orders. Raises DeadlockError if they cannot run to their end."""
    finish = np.zeros_like(instance.duration)
    makespan = run_orders(orders, *timing_arguments(instance), finish)
    if makespan < 0:
        raise DeadlockError("the orders of the ranks deadlock")
    peaks = [order_peak(orders[x], x, instance.activation, instance.split) for x in range(instance.ranks)]
    return Schedule(family, instance, orders, finish, float(makespan), np.array(peaks), how)


def timing_arguments(i: SearchInstance) -> tuple[object, ...]:
    """The arguments of the kernels for an instance."""
    return (i.duration, i.before, i.after, i.total, i.group, i.wait, steps_argument(i), i.latency, i.split)


def steps_argument(i: SearchInstance) -> object:
    """The optimizer steps for the kernels. They are a tuple if ranks hold two chunks in all, because that makes the
    kernels faster. Otherwise they are an array. So kernels are compiled for two cases, not for each number of
    chunks."""
    return tuple(i.step) if len(i.step) == 2 else i.step


def document(schedule: Schedule) -> dict[str, Any]:
    """The document that `dovetail schedule -o` writes.

    A model's `stages` is the number of stages in a pipeline. `ranks` names each stage's rank, by pipeline. With two
    chunks per rank, it names each rank twice. Times and sizes describe one stage. They are one number if they are
    uniform, and otherwise a list by pipeline, stage and micro-batch. A model's `micro_batches` counts the micro-batches
    of one pipeline and mini-batch. The numbers of actions count through all mini-batches. `coupling` says what a
    mini-batch's first forwards wait for, in addition to their own model's optimizer step (`Coupling`).
    `optimizer_step` is given if it takes time."""
    problem, placement = schedule.instance.problem, schedule.instance.placement
    models = []
    for index, m in enumerate(problem.models):
        entry: dict[str, Any] = {"name": m.name, "pipelines": m.pipelines, "stages": m.stages * placement.chunks}
        entry["ranks"] = [placement.path(problem, index, k) for k in range(m.pipelines)]
        if m.first:
            entry["first_rank"] = m.first
        entry["micro_batches"] = m.micro_batches
        for field in ("forward", "backward", "activation"):
            values = problem.along(index, field, placement.chunks)
            uniform = bool((values == values.flat[0]).all())
            entry[field] = _number(values.flat[0]) if uniform else values.tolist()
        if m.optimizer_step:
            entry["optimizer_step"] = _number(m.optimizer_step)
        models.append(entry)
    actions: list[list[dict[str, Any]]] = [[] for _ in range(problem.ranks)]
    for p in schedule.passes():
        row = {"model": p.model, "pipeline": p.pipeline, "stage": p.stage, "micro_batch": p.micro_batch}
        actions[p.rank].append({**row, "kind": p.kind, "start": _number(p.start), "end": _number(p.end)})
    result: dict[str, Any] = {"ranks": problem.ranks, "models": models}
    edges = problem.latencies
    uniform = np.ndim(problem.communication) == 0
    result["communication"] = _number(edges.flat[0]) if uniform else edges.tolist()
    if problem.mini_batches > 1:
        result["mini_batches"] = problem.mini_batches
    return {
        **result,
        "family": schedule.family,
        "coupling": schedule.instance.coupling.value,
        "makespan": _number(schedule.makespan),
        "bound": _number(schedule.bound),
        "peak": _number(schedule.peak),
        "actions": actions,
    }


def _number(value: float) -> float | int:
    value = float(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
