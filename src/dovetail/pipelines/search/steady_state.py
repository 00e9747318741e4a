"""Finds a schedule of few micro-batches, and repeats its steady state for many (as Tessel, arXiv 2311.15269).

The cost of a search grows with the number of micro-batches, and a search finds less in a longer schedule. Between
warm-up and cool-down a good schedule repeats itself. So a schedule of a few micro-batches is found first. Then a
stretch of each rank's order is repeated. It holds the same passes on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from dovetail.pipelines.families import Family, family_instance
from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.problem import ModelPipelines, ScheduleProblem
from dovetail.pipelines.schedule import DeadlockError, Schedule, evaluate
from dovetail.pipelines.simulate import KINDS, Floats, Ints

_CUTS = 24


def shorten(problem: ScheduleProblem, family: Family) -> ScheduleProblem | None:
    """The problem with fewer micro-batches, or None. Its schedule can be unrolled to one of `problem`.

    The problem needs one mini-batch with at least five times as many micro-batches as ranks. Times are the mean over
    micro-batches."""
    unit = _unit(problem)
    # This is about three times the ranks, for warm-up, steady state and cool-down. It is a multiple of the unit.
    count = max(unit[0], -(-3 * problem.ranks // unit[0]) * unit[0])
    if problem.mini_batches > 1 or family.fixed or problem.models[0].micro_batches < 5 * problem.ranks:
        return None
    scale = count // unit[0]
    models = tuple(_mean(problem, m, scale * each) for m, each in enumerate(unit))
    return replace(problem, models=models)


def one_mini_batch(problem: ScheduleProblem) -> ScheduleProblem:
    """The problem with one mini-batch. Times are the mean over micro-batches."""
    models = tuple(_mean(problem, index, m.micro_batches) for index, m in enumerate(problem.models))
    return replace(problem, models=models, mini_batches=1)


def unroll(problem: ScheduleProblem, family: Family, short: Schedule) -> Schedule | None:
    """The best schedule of `problem` that repeats a stretch of `short`, or one stretch of each model. None if no
    stretch can be repeated."""
    instance, unit, old = family_instance(problem, family), _unit(problem), short.instance
    missing = [
        m.micro_batches - other.micro_batches for m, other in zip(problem.models, old.problem.models, strict=True)
    ]
    if missing[0] <= 0 or any(missing[0] * u != each * unit[0] for each, u in zip(missing, unit, strict=True)):
        return None
    ends = [_ends(short, rank) for rank in range(old.ranks)]
    moments = np.linspace(0.1, 0.9, _CUTS) * short.makespan

    def repeated() -> Iterator[Ints | None]:
        for width in (1, 2, 3, 4):
            period = [width * each for each in unit]
            if missing[0] % period[0]:
                continue
            together = [_stretches(short, ends, period, float(t)) for t in moments]
            if len(period) == 1:
                yield from (_repeat(old, short.orders, [s], missing[0] // period[0]) for s in together)
                continue
            actor = [_stretches(short, ends, [period[0], 0], float(t)) for t in moments[:: len(moments) // 6]]
            critic = [_stretches(short, ends, [0, period[1]], float(t)) for t in moments[:: len(moments) // 6]]
            for spans in [[s] for s in together] + [[s, t] for s in actor for t in critic]:
                yield _repeat(old, short.orders, spans, missing[0] // period[0])

    return _fastest(instance, repeated(), problem.memory_limit, family.name, "period")


def drop(problem: ScheduleProblem, spare: int = 1) -> ScheduleProblem | None:
    """The problem without the larger model's steady state, or None if this leaves out only a few micro-batches.

    If memory is scarce, the larger model runs 1F1B, and the smaller one fits in its warm-up and cool-down. Between
    them, in the steady state, the larger model runs alone. The problem keeps as many of its micro-batches as its
    pipeline has stages, and `spare` quarters of that more. Times are the mean over micro-batches."""
    work = [
        float((problem.array(m, "forward") + problem.array(m, "backward")).sum()) for m in range(len(problem.models))
    ]
    index = work.index(max(work))
    larger = problem.models[index]
    keep = larger.stages + spare * max(2, larger.stages // 4)
    if problem.mini_batches > 1 or larger.micro_batches < keep + max(4, larger.stages // 4):
        return None
    models = [_mean(problem, m, each.micro_batches) for m, each in enumerate(problem.models)]
    models[index] = replace(models[index], micro_batches=keep)
    return replace(problem, models=tuple(models))


def restore(instance: SearchInstance, short: Schedule, limit: float) -> Ints | None:
    """Orders of `instance` from a schedule of its problem without the steady state (`drop`).

    One micro-batch's passes of the larger model, which are neighbours on every rank, are repeated. The result is the
    fastest within `limit`, or None."""
    counts = [m.micro_batches for m in short.instance.problem.models]
    missing = [m.micro_batches - count for m, count in zip(instance.problem.models, counts, strict=True)]
    period = [int(more > 0) for more in missing]
    ends = [_ends(short, rank) for rank in range(short.instance.ranks)]
    found = _fastest(
        instance,
        (
            _repeat(short.instance, short.orders, [_stretches(short, ends, period, float(moment))], max(missing))
            for moment in np.linspace(0.1, 0.9, 4 * _CUTS) * short.makespan
        ),
        limit,
    )
    return None if found is None else found.orders


def _fastest(
    instance: SearchInstance, tried: Iterable[Ints | None], limit: float | None, family: str = "", how: str = "rule"
) -> Schedule | None:
    """The fastest schedule of these orders that runs and fits. Of equally fast ones it has the least memory."""
    best: Schedule | None = None
    for orders in tried:
        if orders is None:
            continue
        try:
            found = evaluate(instance, orders, family, how)
        except DeadlockError:
            continue
        fits = found.peaks.min() >= 0 and found.fits(limit)
        if fits and (best is None or (found.makespan, found.peak) < (best.makespan, best.peak)):
            best = found
    return best


def _unit(problem: ScheduleProblem) -> list[int]:
    """The least numbers of micro-batches of the models' pipelines that belong together: K1 * M1 = K2 * M2."""
    k = [m.pipelines for m in problem.models]
    common = math.lcm(*k)
    return [common // each for each in k]


def _mean(problem: ScheduleProblem, index: int, count: int) -> ModelPipelines:
    m = problem.models[index]

    def shrunk(field: str) -> Floats:
        mean: Floats = problem.along(index, field, m.parts).mean(axis=2, keepdims=True)
        return mean

    return replace(
        m,
        micro_batches=count,
        forward=shrunk("forward"),
        backward=shrunk("backward"),
        input_gradient=shrunk("input_gradient"),
        weight_gradient=shrunk("weight_gradient"),
        activation=shrunk("activation"),
    )


Spans = list[tuple[int, int]] | None


def _stretches(short: Schedule, ends: list[Floats], period: list[int], moment: float) -> Spans:
    """The stretch of each rank that has the passes of exactly `period` micro-batches and begins nearest to `moment`."""
    i = short.instance
    wanted = np.zeros(KINDS * len(i.total), dtype=np.int64)
    for c in range(len(i.total)):
        wanted[KINDS * c : KINDS * c + i.kinds] = period[c // i.placement.chunks]
    found = []
    for rank in range(i.ranks):
        span = _stretch(short.orders[rank], ends[rank], wanted, moment)
        if span is None:
            return None
        found.append(span)
    return found


def _repeat(i: SearchInstance, orders: Ints, stretches: list[Spans], copies: int) -> Ints | None:
    """The orders with these stretches repeated, or None if they overlap."""
    rows = []
    for rank in range(i.ranks):
        order, last = orders[rank], orders.shape[1]
        for begin, end in sorted((spans[rank] for spans in stretches if spans is not None), reverse=True):
            if end > last:
                return None
            order = np.concatenate([order[:end], np.tile(order[begin:end], copies), order[end:]])
            last = begin
        rows.append(order)
    return None if any(spans is None for spans in stretches) else np.array(rows)


def _ends(short: Schedule, rank: int) -> Floats:
    count, ends = np.zeros(KINDS * len(short.instance.total), dtype=np.int64), []
    for code in map(int, short.orders[rank]):
        ends.append(short.finish[code // KINDS, code % KINDS, rank, count[code]])
        count[code] += 1
    return np.array(ends)


def _stretch(order: Ints, ends: Floats, wanted: Ints, moment: float) -> tuple[int, int] | None:
    counts = np.zeros((len(order) + 1, len(wanted)), dtype=np.int64)
    counts[np.arange(1, len(order) + 1), order] = 1
    counts = counts.cumsum(axis=0)
    length = int(wanted.sum())
    starts = np.flatnonzero((counts[length:] - counts[:-length] == wanted).all(axis=1))
    if not len(starts):
        return None
    begins = np.concatenate([[0.0], ends])[starts]
    at = int(starts[np.abs(begins - moment).argmin()])
    return at, at + length
