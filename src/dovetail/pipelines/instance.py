"""A problem under one family's rules, as arrays for the kernels; its lower bound and its mirror image in time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from dovetail.pipelines.problem import Problem
from dovetail.pipelines.simulate import KINDS, B, F, Floats, Ints, W


class Coupling(Enum):
    """Which work a mini-batch's first forward waits for, beside its own model's optimizer step."""

    SERIAL = "serial"  # one model after the other
    MINI_BATCH = "mini-batch"  # both models start a mini-batch together
    ROLLED = "rolled"  # only the own model counts: work of one model crosses the other's mini-batch borders


@dataclass(frozen=True, eq=False)
class Instance:
    """What `simulate` takes, and what a search needs beside. Chunk 0 is the actor, chunk 1 the critic.

    `position` (C, N): stage on a rank, -1 where a rank holds none. `stages` (C,): of a pipeline. `tail` (C, 3, N, Q):
    least time from a pass's end to the last end that depends on it. `mirrored`: the kinds are in the order of the
    mirror image in time. For the other arrays see `simulate`."""

    problem: Problem
    reverse: bool
    split: bool
    coupling: Coupling
    duration: Floats
    activation: Floats
    before: Ints
    after: Ints
    position: Ints
    stages: Ints
    total: Ints
    group: Ints
    wait: Ints
    step: Floats
    latency: Floats
    tail: Floats
    mirrored: bool = False

    @property
    def ranks(self) -> int:
        return int(self.duration.shape[2])

    @property
    def kinds(self) -> int:
        return 3 if self.split else 2

    @property
    def form(self) -> int:
        """Order of kinds, for the list scheduler. 0: F, B. 1: F, I, W. 2: the mirror image of 1, that is W, I, F. There
        the second kind waits for the previous stage and the third for the next stage."""
        return 0 if not self.split else 2 if self.mirrored else 1

    @property
    def length(self) -> int:
        """Passes of one rank."""
        return int(self.kinds * self.total.sum())

    def holds(self, orders: Ints) -> bool:
        """Whether orders have exactly the passes of the instance on every rank."""
        if orders.shape != (self.ranks, self.length) or orders.min() < 0:
            return False
        counts = np.zeros(2 * KINDS, np.int64)
        for m in (0, 1):
            counts[KINDS * m : KINDS * m + self.kinds] = self.total[m]
        return all(np.array_equal(np.bincount(order, minlength=2 * KINDS), counts) for order in orders)


def make_instance(problem: Problem, *, reverse: bool, split: bool, coupling: Coupling) -> Instance:
    """Arrays of a problem. `reverse`: the critic's pipelines run against the actor's, inside each block of ranks."""
    n, count = problem.ranks, problem.mini_batches
    total = np.array([m.micro_batches * count for m in problem.models], dtype=np.int64)
    duration = np.zeros((2, KINDS, n, int(total.max())))
    activation = np.zeros((2, n, int(total.max())))
    position = np.full((2, n), -1, dtype=np.int64)
    before, after = (np.full((2, n, 2), -1, dtype=np.int64) for _ in range(2))
    latency, edges = np.zeros((2, 2, n)), problem.latencies
    for index, m in enumerate(problem.models):
        backwards = reverse and index == 1
        times = [problem.array(index, "forward"), problem.array(index, "input_gradient" if split else "backward")]
        if split:
            times.append(problem.array(index, "weight_gradient"))
        sizes = problem.array(index, "activation")
        for k in range(m.pipelines):
            block = list(m.ranks[k * m.stages : (k + 1) * m.stages])
            path = block[::-1] if backwards else block
            for stage, rank in enumerate(path):
                position[index, rank] = stage
                if stage:
                    before[index, rank] = index, path[stage - 1]
                    latency[index, F, rank] = edges[path[stage - 1], rank]
                if stage + 1 < m.stages:
                    after[index, rank] = index, path[stage + 1]
                    latency[index, B, rank] = edges[path[stage + 1], rank]
                source, q = block[stage], slice(0, int(total[index]))
                for kind, values in enumerate(times):
                    duration[index, kind, rank, q] = values[source]
                activation[index, rank, q] = sizes[source]
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
            if (back := instance.before[m, rank, 1]) >= 0:
                t[m, B, rank] = np.maximum(t[m, B, rank], latency[m, B, back] + d[m, B, back] + t[m, B, back])
        for rank in by_stage[::-1]:
            onward = instance.after[m, rank, 1]
            if onward < 0:
                t[m, F, rank] = d[m, B, rank] + t[m, B, rank]
            else:
                t[m, F, rank] = latency[m, F, onward] + d[m, F, onward] + t[m, F, onward]


def lower_bound(instance: Instance) -> float:
    """A makespan that no schedule of the instance beats (RLHFuse section 7.3; its printed values also need the bound of
    one model alone).

    For each rank: the earliest arrival of a pass, plus all passes of both models, plus the least time after the last
    pass. The same for the passes of one model alone. Optimizer steps separate mini-batches: those of the same model in
    rolled families, else those of both."""
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
            # The last pass may be a weight gradient. Nothing waits for it.
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
    """The work of the busiest rank. No schedule of any family is faster."""
    actor, critic = (problem.array(m, "forward").sum(1) + problem.array(m, "backward").sum(1) for m in (0, 1))
    # The critic's stages may be placed in the opposite order.
    m = problem.models[1]
    reverse = critic.reshape(m.pipelines, m.stages)[:, ::-1].reshape(-1)
    return float(min((actor + critic).max(), (actor + reverse).max()))


def _arrival(instance: Instance, m: int, q: int) -> Floats:
    """Earliest start of micro-batch q's forward on each rank."""
    result = np.zeros(instance.ranks)
    for rank in np.argsort(instance.position[m], kind="stable"):
        if (back := instance.before[m, rank, 1]) >= 0:
            result[rank] = result[back] + instance.duration[m, F, back, q] + instance.latency[m, F, rank]
    return result


def mirror(instance: Instance) -> Instance:
    """The instance run backwards in time: the first and the last kind of passes change places. This is valid only where
    barriers between mini-batches look the same from both ends."""
    duration, activation = np.zeros_like(instance.duration), np.zeros_like(instance.activation)
    latency, last = np.zeros_like(instance.latency), instance.kinds - 1
    for m in (0, 1):
        n = int(instance.total[m])
        for kind in range(instance.kinds):
            duration[m, kind, :, :n] = instance.duration[m, last - kind, :, :n][:, ::-1]
        for rank in range(instance.ranks):
            if (back := instance.before[m, rank, 1]) >= 0:
                latency[m, 0, rank] = instance.latency[m, 1, back]
            if (onward := instance.after[m, rank, 1]) >= 0:
                latency[m, 1, rank] = instance.latency[m, 0, onward]
        activation[m, :, :n] = instance.activation[m, :, :n][:, ::-1]
    return replace(instance, duration=duration, activation=activation, latency=latency, mirrored=True)


_SWAPPED = {2: np.array([1, 0, 2, 4, 3, 5]), 3: np.array([2, 1, 0, 5, 4, 3])}


def unmirror(instance: Instance, orders: Ints) -> Ints:
    """Orders of the instance itself, from those of its mirror image."""
    return np.ascontiguousarray(_SWAPPED[instance.kinds][orders[:, ::-1]])
