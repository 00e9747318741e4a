"""Leaves the larger model's steady state out of a problem, and repeats it in the schedule that was found without it (as
Tessel, arXiv 2311.15269). So schedules of little memory are found: a search finds less in a longer schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.problem import ModelPipelines, ScheduleProblem
from dovetail.pipelines.schedule import DeadlockError, Schedule, evaluate
from dovetail.pipelines.simulate import KINDS, Floats, Ints

_CUTS = 24


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
    models = [mean_model(problem, m, each.micro_batches) for m, each in enumerate(problem.models)]
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
            _repeat(short.orders, _stretches(short, ends, period, float(moment)), max(missing))
            for moment in np.linspace(0.1, 0.9, 4 * _CUTS) * short.makespan
        ),
        limit,
    )
    return None if found is None else found.orders


def _fastest(instance: SearchInstance, tried: Iterable[Ints | None], limit: float) -> Schedule | None:
    """The fastest schedule of these orders that runs and fits. Of equally fast ones it has the least memory."""
    best: Schedule | None = None
    for orders in tried:
        if orders is None:
            continue
        try:
            found = evaluate(instance, orders)
        except DeadlockError:
            continue
        fits = found.peaks.min() >= 0 and found.fits(limit)
        if fits and (best is None or (found.makespan, found.peak) < (best.makespan, best.peak)):
            best = found
    return best


def mean_model(problem: ScheduleProblem, index: int, count: int) -> ModelPipelines:
    """A model of a problem with `count` micro-batches, each with the mean of their times and sizes."""
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


def _repeat(orders: Ints, spans: Spans, copies: int) -> Ints | None:
    """The orders with each rank's stretch repeated, or None without stretches."""
    if spans is None:
        return None
    rows = [
        np.concatenate([order[:end], np.tile(order[begin:end], copies), order[end:]])
        for order, (begin, end) in zip(orders, spans, strict=True)
    ]
    return np.array(rows)


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
