"""Describes a problem under one family's rules as arrays for the kernels, and makes its mirror image in time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from dovetail.pipelines.problem import ScheduleProblem
from dovetail.pipelines.simulate import KINDS, B, F, Floats, Ints, W


class Coupling(Enum):
    """The work that a mini-batch's first forward waits for, in addition to its own model's optimizer step."""

    SERIAL = "serial"  # one model after the other
    MINI_BATCH = "mini-batch"  # both models start a mini-batch together
    ROLLED = "rolled"  # nothing else, so work of one model crosses the other's mini-batch borders


class Shape(Enum):
    """The stages' places in a pipeline of p ranks, if each rank holds several chunks. Stage s is in chunk s // p."""

    ZIGZAG = "zigzag"  # there and back again: 0 to p - 1, then p - 1 to 0. With two chunks this is a V
    LOOP = "loop"  # 0 to p - 1, again from 0: interleaved 1F1B (Narayanan et al. 2021, section 2.2)


@dataclass(frozen=True)
class StagePlacement:
    """The places of the models' stages. `reverse`: the critic's pipelines run in the opposite direction to the actor's,
    inside each block of ranks. `chunks`: the number of stages of a model on each of its ranks."""

    reverse: bool = False
    chunks: int = 1
    shape: Shape = Shape.ZIGZAG

    def path(self, problem: ScheduleProblem, model: int, pipeline: int) -> list[int]:
        """The rank of every stage of a pipeline."""
        m = problem.models[model]
        block = list(m.ranks[pipeline * m.stages : (pipeline + 1) * m.stages])
        if self.reverse and model == 1:
            block = block[::-1]
        back = block[::-1] if self.shape is Shape.ZIGZAG else block
        return [rank for chunk in range(self.chunks) for rank in (back if chunk % 2 else block)]


@dataclass(frozen=True, eq=False)
class SearchInstance:
    """The arrays that `simulate` takes, and what else a search needs. With v chunks a rank, chunks 0 to v - 1 are the
    actor's, and v to 2v - 1 the critic's.

    `position` (C, N): the stage on a rank, or -1 if the rank holds none. `stages` (C,): the stages of a pipeline.
    `tail` (C, 3, N, Q): the least time from a pass's end to the last end that depends on it. `mirrored`: the kinds are
    in the order of the mirror image in time. For the other arrays see `simulate`."""

    problem: ScheduleProblem
    placement: StagePlacement
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
        """The order of kinds, for the list scheduler. 0: F, B. 1: F, I, W. 2: W, I, F, the mirror image of 1. With 2
        the second kind waits for the previous stage and the third for the next stage."""
        return 0 if not self.split else 2 if self.mirrored else 1

    @property
    def length(self) -> int:
        """The number of passes of one rank."""
        return int(self.kinds * self.total.sum())

    def chunks(self, model: int) -> range:
        """The chunks of a model."""
        return range(model * self.placement.chunks, (model + 1) * self.placement.chunks)

    def place(self, rank: int, model: int) -> tuple[int, int]:
        """The number of ranks of a model's pipeline, and the place of this rank in the order of the first chunk."""
        return self.problem.models[model].stages, int(self.position[self.chunks(model).start, rank])

    def nodes(self, model: int) -> list[tuple[int, int]]:
        """The chunk and the rank of each stage of a model's pipelines, in the order of stages."""
        held = [(c, rank) for c in self.chunks(model) for rank in range(self.ranks) if self.position[c, rank] >= 0]
        return sorted(held, key=lambda node: int(self.position[node]))

    def holds(self, orders: Ints) -> bool:
        """Whether orders have exactly the passes of the instance on every rank."""
        if orders.shape != (self.ranks, self.length) or orders.min() < 0:
            return False
        counts = np.zeros(KINDS * len(self.total), np.int64)
        for c, total in enumerate(self.total):
            counts[KINDS * c : KINDS * c + self.kinds] = total
        return all(np.array_equal(np.bincount(order, minlength=len(counts)), counts) for order in orders)


def make_instance(
    problem: ScheduleProblem, placement: StagePlacement, *, split: bool, coupling: Coupling
) -> SearchInstance:
    """The arrays of a problem whose stages are where `placement` says."""
    n, count, v = problem.ranks, problem.mini_batches, placement.chunks
    owner = np.repeat(range(len(problem.models)), v)
    total = np.array([problem.models[m].micro_batches * count for m in owner], dtype=np.int64)
    duration = np.zeros((len(owner), KINDS, n, int(total.max())))
    activation = np.zeros((len(owner), n, int(total.max())))
    position = np.full((len(owner), n), -1, dtype=np.int64)
    before, after = (np.full((len(owner), n, 2), -1, dtype=np.int64) for _ in range(2))
    latency, edges = np.zeros((len(owner), 2, n)), problem.latencies
    for index, m in enumerate(problem.models):
        times = [problem.along(index, field, v) for field in ("forward", "input_gradient" if split else "backward")]
        if split:
            times.append(problem.along(index, "weight_gradient", v))
        sizes = problem.along(index, "activation", v)
        q = slice(0, m.micro_batches * count)
        for k in range(m.pipelines):
            path = placement.path(problem, index, k)
            for stage, rank in enumerate(path):
                c = index * v + stage // m.stages
                position[c, rank] = stage
                # Two neighbouring stages on one rank need no message.
                if stage:
                    before[c, rank] = index * v + (stage - 1) // m.stages, path[stage - 1]
                    latency[c, F, rank] = edges[path[stage - 1], rank] if path[stage - 1] != rank else 0.0
                if stage + 1 < len(path):
                    after[c, rank] = index * v + (stage + 1) // m.stages, path[stage + 1]
                    latency[c, B, rank] = edges[path[stage + 1], rank] if path[stage + 1] != rank else 0.0
                for kind, values in enumerate(times):
                    duration[c, kind, rank, q] = values[k, stage]
                activation[c, rank, q] = sizes[k, stage]
    wait = np.zeros((len(owner), count, len(owner)), dtype=np.int64)
    for k in range(count):
        for c, mine in enumerate(owner):
            for o, other in enumerate(owner):
                if mine == other or coupling is not Coupling.ROLLED:
                    wait[c, k, o] = k
                if coupling is Coupling.SERIAL and (mine, other) == (1, 0):
                    wait[c, k, o] = k + 1
    instance = SearchInstance(
        problem,
        placement,
        split,
        coupling,
        duration,
        activation,
        before,
        after,
        position,
        np.array([problem.models[m].stages * v for m in owner], dtype=np.int64),
        total,
        np.array([problem.models[m].micro_batches for m in owner], dtype=np.int64),
        wait,
        np.array([problem.models[m].optimizer_step for m in owner]),
        latency,
        np.zeros_like(duration),
    )
    _fill_tails(instance)
    return instance


def _fill_tails(instance: SearchInstance) -> None:
    d, t, latency = instance.duration, instance.tail, instance.latency
    for m in range(len(instance.problem.models)):
        nodes = instance.nodes(m)
        for c, rank in nodes:
            t[c, B, rank] = d[c, W, rank]
            p, back = instance.before[c, rank]
            if back >= 0:
                t[c, B, rank] = np.maximum(t[c, B, rank], latency[p, B, back] + d[p, B, back] + t[p, B, back])
        for c, rank in nodes[::-1]:
            p, onward = instance.after[c, rank]
            if onward < 0:
                t[c, F, rank] = d[c, B, rank] + t[c, B, rank]
            else:
                t[c, F, rank] = latency[p, F, onward] + d[p, F, onward] + t[p, F, onward]


def mirror(instance: SearchInstance) -> SearchInstance:
    """The instance run backwards in time: the first and the last kind of passes change places. This is valid only if
    barriers between mini-batches look the same from both ends."""
    duration, activation = np.zeros_like(instance.duration), np.zeros_like(instance.activation)
    latency, last = np.zeros_like(instance.latency), instance.kinds - 1
    for c, n in enumerate(map(int, instance.total)):
        for kind in range(instance.kinds):
            duration[c, kind, :, :n] = instance.duration[c, last - kind, :, :n][:, ::-1]
        for rank in range(instance.ranks):
            p, back = instance.before[c, rank]
            if back >= 0:
                latency[c, 0, rank] = instance.latency[p, 1, back]
            p, onward = instance.after[c, rank]
            if onward >= 0:
                latency[c, 1, rank] = instance.latency[p, 0, onward]
        activation[c, :, :n] = instance.activation[c, :, :n][:, ::-1]
    return replace(instance, duration=duration, activation=activation, latency=latency, mirrored=True)


def unmirror(instance: SearchInstance, orders: Ints) -> Ints:
    """The orders of the instance itself, from those of its mirror image."""
    codes = orders[:, ::-1]
    return np.ascontiguousarray(KINDS * (codes // KINDS) + instance.kinds - 1 - codes % KINDS)
