"""Defines a schedule: the orders of passes on all ranks, their times and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
