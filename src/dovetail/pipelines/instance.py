"""A problem under one family's rules, as arrays for the kernels; and its lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from dovetail.pipelines.problem import Floats, Problem

Ints = npt.NDArray[np.int64]
F, B, W = 0, 1, 2
KINDS = 3
"""Operation code = KINDS * model + kind. B is the whole backward, or the input gradient (I) where it is split."""


class Coupling(Enum):
    """Which work a mini-batch's first forward waits for, beside its own model's optimizer step."""

    SERIAL = "serial"  # one model after the other
    MINI_BATCH = "mini-batch"  # both models start a mini-batch together
    ROLLED = "rolled"  # only the own model counts: work of one model crosses the other's mini-batch borders


@dataclass(frozen=True, eq=False)
class Instance:
    """Arrays over (model, rank) and (model, kind, rank, micro-batch); micro-batches count through all mini-batches."""

    problem: Problem
    reverse: bool
    split: bool
    coupling: Coupling
    duration: Floats  # (2, 3, N, Q)
    activation: Floats  # (2, N, Q)
    before: Ints  # (2, N): rank of the previous stage, -1 at the first
    after: Ints  # (2, N)
    position: Ints  # (2, N): stage
    stages: Ints  # (2,)
    total: Ints  # (2,): micro-batches of one pipeline, all mini-batches
    group: Ints  # (2,): micro-batches of one mini-batch
    wait: Ints  # (2, n, 2): mini-batches of each model to be finished everywhere before this mini-batch's forwards
    step: Floats  # (2,)
    latency: Floats  # (2, 2, N): before a rank's forward, from the previous stage; before its backward, from the next
    tail: Floats  # (2, 3, N, Q): least time from an operation's end to the last end that depends on it
    mirrored: bool = False  # kinds are in the order of the mirror image in time

    @property
    def ranks(self) -> int:
        return int(self.duration.shape[2])

    @property
    def kinds(self) -> int:
        return 3 if self.split else 2

    @property
    def form(self) -> int:
        """Kinds as the list scheduler takes them. 0: F and whole B; 1: F, I, W; 2, the latter's mirror image: W, I, F,
        where the passes that come from the previous stage are the second kind, from the next stage the third."""
        return 0 if not self.split else 2 if self.mirrored else 1

    @property
    def length(self) -> int:
        """Operations of one rank."""
        return int(self.kinds * self.total.sum())


def make_instance(problem: Problem, *, reverse: bool, split: bool, coupling: Coupling) -> Instance:
    """`reverse`: the critic's pipelines run against the actor's, inside each block of ranks."""
    n, count = problem.ranks, problem.mini_batches
    total = np.array([m.micro_batches * count for m in problem.models], dtype=np.int64)
    duration = np.zeros((2, KINDS, n, int(total.max())))
    activation = np.zeros((2, n, int(total.max())))
    before, after, position = (np.full((2, n), -1, dtype=np.int64) for _ in range(3))
    latency, edges = np.zeros((2, 2, n)), problem.latencies
    for index, m in enumerate(problem.models):
        backwards = reverse and index == 1
        for k in range(m.pipelines):
            block = list(m.ranks[k * m.stages : (k + 1) * m.stages])
            path = block[::-1] if backwards else block
            for stage, rank in enumerate(path):
                position[index, rank] = stage
                before[index, rank] = path[stage - 1] if stage else -1
                after[index, rank] = path[stage + 1] if stage + 1 < m.stages else -1
                if stage:
                    latency[index, F, rank] = edges[path[stage - 1], rank]
                if stage + 1 < m.stages:
                    latency[index, B, rank] = edges[path[stage + 1], rank]
                source, q = block[stage], slice(0, int(total[index]))
                duration[index, F, rank, q] = problem.array(index, "forward")[source]
                duration[index, B, rank, q] = problem.array(index, "input_gradient" if split else "backward")[source]
                if split:
                    duration[index, W, rank, q] = problem.array(index, "weight_gradient")[source]
                activation[index, rank, q] = problem.array(index, "activation")[source]
    wait = np.zeros((2, count, 2), dtype=np.int64)
    for k in range(count):
        for index in (0, 1):
            wait[index, k, index] = k
            if coupling is not Coupling.ROLLED:
                wait[index, k, 1 - index] = k
        if coupling is Coupling.SERIAL:
            wait[1, k, 0] = k + 1
    instance = Instance(
        problem,
        reverse,
        split,
        coupling,
        duration,
        activation,
        before,
        after,
        position,
        np.array([m.stages for m in problem.models], dtype=np.int64),
        total,
        np.array([m.micro_batches for m in problem.models], dtype=np.int64),
        wait,
        np.array([m.optimizer_step for m in problem.models]),
        latency,
        np.zeros_like(duration),
    )
    _fill_tails(instance)
    return instance


def _fill_tails(instance: Instance) -> None:
    d, t, latency = instance.duration, instance.tail, instance.latency
    for m in (0, 1):
        by_stage = np.argsort(instance.position[m], kind="stable")
        for rank in by_stage:
            t[m, B, rank] = d[m, W, rank]
            if (back := instance.before[m, rank]) >= 0:
                t[m, B, rank] = np.maximum(t[m, B, rank], latency[m, B, back] + d[m, B, back] + t[m, B, back])
        for rank in by_stage[::-1]:
            onward = instance.after[m, rank]
            if onward < 0:
                t[m, F, rank] = d[m, B, rank] + t[m, B, rank]
            else:
                t[m, F, rank] = latency[m, F, onward] + d[m, F, onward] + t[m, F, onward]


def lower_bound(instance: Instance) -> float:
    """No schedule of the instance is faster (RLHFuse section 7.3, with what its printed values need beside).

    On each rank: the earliest arrival of any task, all tasks of both models, the least that remains after the last; and
    the same of one model's tasks alone. Mini-batches are separated by optimizer steps: of the same model where
    schedules are rolled, else of both."""
    n = instance.problem.mini_batches
    alone = np.zeros((2, n))
    both = np.zeros(n)
    rank_arrival, rank_work = np.full(instance.ranks, np.inf), np.zeros(instance.ranks)
    rank_tail = np.full(instance.ranks, np.inf)
    for k in range(n):
        arrival, tail = np.zeros((2, instance.ranks)), np.zeros((2, instance.ranks))
        work, chained = np.zeros((2, instance.ranks)), np.zeros((2, instance.ranks))
        for m in (0, 1):
            first, last = k * instance.group[m], (k + 1) * instance.group[m]
            arrival[m] = _arrival(instance, m, int(first))
            work[m] = instance.duration[m, :, :, first:last].sum(axis=(0, 2))
            chained[m] = instance.duration[m, :W, :, first:last].sum(axis=(0, 2))
            b_tail = instance.tail[m, B, :, last - 1]
            # The last task may be a weight gradient, which nothing waits for.
            tail[m] = 0.0 if instance.split else b_tail
            alone[m, k] = max((arrival[m] + chained[m] + b_tail).max(), (arrival[m] + work[m] + tail[m]).max())
        both[k] = max((arrival.min(axis=0) + work.sum(axis=0) + tail.min(axis=0)).max(), alone[:, k].max())
        if k == 0:
            rank_arrival = arrival.min(axis=0)
        if k == n - 1:
            rank_tail = tail.min(axis=0)
        rank_work += work.sum(axis=0)
    steps = instance.step * (n - 1)
    chains = float(max(alone[m].sum() + steps[m] for m in (0, 1)))
    if instance.coupling is Coupling.SERIAL:
        return float(alone.sum() + instance.step.sum() * (n - 1))
    if instance.coupling is Coupling.MINI_BATCH:
        return max(float(both.sum() + steps.min()), chains)

    return max(float((rank_arrival + rank_work + rank_tail).max()), chains)


def zero_bubble_limit(problem: Problem) -> float:
    """The work of the busiest rank: no schedule of any family is faster."""
    work = [problem.array(m, "forward").sum(1) + problem.array(m, "backward").sum(1) for m in (0, 1)]
    forward_only = work[0] + work[1]
    # The critic may be placed the other way round.
    m = problem.models[1]
    flipped = work[0] + work[1].reshape(m.pipelines, m.stages)[:, ::-1].reshape(-1)
    return float(min(forward_only.max(), flipped.max()))


def _arrival(instance: Instance, m: int, q: int) -> Floats:
    """Earliest start of micro-batch q's forward on each rank."""
    result = np.zeros(instance.ranks)
    for rank in np.argsort(instance.position[m], kind="stable"):
        if (back := instance.before[m, rank]) >= 0:
            result[rank] = result[back] + instance.duration[m, F, back, q] + instance.latency[m, F, rank]
    return result
