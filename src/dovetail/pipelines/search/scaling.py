"""Finds a schedule of few ranks, and stretches it for many.

A search finds little in a pipeline of 64 ranks, because each listing of its passes takes long. With f times as many
ranks and f times as many micro-batches a schedule looks the same from afar: its starts, divided by f, are nearly a
function of the place x / N of the rank and the place q / M of the micro-batch. So a problem of few ranks is solved
first. Its starts are interpolated, and a list scheduler lists the passes of the large problem in that order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dovetail.pipelines.families import Family
from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.problem import ModelPipelines, ProblemError, ScheduleProblem
from dovetail.pipelines.schedule import Schedule, timing_arguments
from dovetail.pipelines.search.listing import list_schedule
from dovetail.pipelines.simulate import Floats, Ints

SMALL = 16
"""The most ranks that a search handles well."""
LEAST = 4
"""The fewest ranks with which a problem says much about a large one."""
WINDOWS = (1e300, 10.0)
"""How much earlier than its interpolated start a pass may start, as multiples of the longest forward."""


def many_ranks(problem: ScheduleProblem) -> bool:
    """Whether a problem has more ranks than a search handles well, and one mini-batch."""
    return problem.ranks > SMALL and problem.mini_batches == 1


def fewer_ranks(problem: ScheduleProblem, family: Family) -> ScheduleProblem | None:
    """The problem with at most `SMALL` ranks, each of which stands for several. Micro-batches are fewer by the same
    factor.

    None if the problem is small enough, if stages or micro-batches cannot be divided so, or if the divided memory
    limit is below what the small problem needs. Times and sizes are means."""
    counts = [(m.stages, m.micro_batches) for m in problem.models]
    factors = [f for f in range(2, problem.ranks // LEAST + 1) if problem.ranks <= f * SMALL]
    factor = next((f for f in factors if all(s % f == 0 == q % f for s, q in counts)), None)
    if not many_ranks(problem) or family.fixed or factor is None:
        return None
    edges = problem.latencies
    between = edges[~np.eye(problem.ranks, dtype=bool)]
    limit = None if problem.memory_limit is None else problem.memory_limit / factor
    try:
        return replace(
            problem,
            models=tuple(_fewer(problem, index, factor) for index in range(len(problem.models))),
            communication=float(between.mean()),
            memory_limit=limit,
        )
    except ProblemError:
        return None


def stretch(instance: SearchInstance, small: Schedule) -> list[Ints]:
    """Orders of `instance` by the starts of `small`, a schedule of its problem with fewer ranks.

    The list is empty if no such order keeps to the memory limit of the instance."""
    keys = _interpolated(instance, small)
    limit = instance.problem.memory_limit
    unit = float(instance.duration[:, 0].max())
    chunks = len(instance.total)
    room = np.full((instance.ranks, chunks), instance.total.max())
    *timing, _ = timing_arguments(instance)
    found = []
    for window in WINDOWS:
        orders = np.zeros((instance.ranks, instance.length), np.int64)
        end = list_schedule(
            *timing, instance.activation, instance.form, 1e300 if limit is None else limit * (1 + 1e-9), room, keys,
            0.0, window * unit, np.zeros((chunks, 3)), 1e300, np.zeros_like(instance.duration), orders,
        )  # fmt: skip
        if end >= 0:
            found.append((float(end), orders))
    return [orders for _, orders in sorted(found, key=lambda pair: pair[0])]


def _interpolated(instance: SearchInstance, small: Schedule) -> Floats:
    """The starts (C, 3, N, Q) of the passes of `instance`, interpolated between those of `small`, in the time of
    `instance`."""
    s = small.instance
    factor = instance.ranks // s.ranks
    starts, keys = small.finish - s.duration, np.zeros_like(instance.duration)
    ranks = np.arange(instance.ranks)
    for c in range(len(instance.total)):
        model = c // instance.placement.chunks
        stages, few = instance.problem.models[model].stages, s.problem.models[model].stages
        # Interpolate only between ranks of one pipeline. Neighbouring pipelines have nothing to do with each other.
        first = ranks // stages * few
        low, high, part = _between(instance.ranks, factor, first, first + few - 1)
        count, fewer = int(instance.total[c]), int(s.total[c])
        before, after, share = _between(count, count // fewer, np.zeros(count, int), np.full(count, fewer - 1))
        for kind in range(instance.kinds):
            rows = starts[c, kind][:, before] * (1 - share) + starts[c, kind][:, after] * share
            keys[c, kind, :, :count] = factor * (rows[low] * (1 - part)[:, None] + rows[high] * part[:, None])
    return keys


def _between(count: int, factor: int, lowest: Ints, highest: Ints) -> tuple[Ints, Ints, Floats]:
    """For each of `count` places, the two of the count / factor places that are around it. The third array says how
    near it is to the second of them, from 0 to 1."""
    place = (np.arange(count) + 0.5) / factor - 0.5
    low = np.clip(np.floor(place).astype(np.int64), lowest, highest)
    return low, np.clip(low + 1, lowest, highest), np.clip(place - low, 0.0, 1.0)


def _fewer(problem: ScheduleProblem, index: int, factor: int) -> ModelPipelines:
    m = problem.models[index]

    def mean(field: str) -> Floats:
        values = problem.along(index, field, m.parts)
        shape = (m.pipelines, m.stages * m.parts // factor, factor, m.micro_batches // factor, factor)
        grouped: Floats = values.reshape(shape).mean(axis=(2, 4))
        return grouped

    return replace(
        m,
        stages=m.stages // factor,
        micro_batches=m.micro_batches // factor,
        first=m.first // factor,
        forward=mean("forward"),
        backward=mean("backward"),
        input_gradient=mean("input_gradient"),
        weight_gradient=mean("weight_gradient"),
        activation=mean("activation"),
    )
