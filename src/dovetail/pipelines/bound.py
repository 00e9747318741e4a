"""Lower bounds: makespans that no schedule of an instance beats."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dovetail.pipelines.instance import Coupling, SearchInstance
from dovetail.pipelines.simulate import B, F, Floats, W


@lru_cache(maxsize=8)  # a search asks for it often; instances are compared by identity
def lower_bound(instance: SearchInstance) -> float:
    """A makespan that no schedule of the instance beats (RLHFuse section 7.3). The values that the paper prints also
    need the bound of one model alone.

    The bound is the largest of several bounds. The first bound adds three times of a rank: the earliest arrival of a
    pass, all passes of both models, and the least time after the last pass. The second bound does the same for one
    model alone. If a rank holds several chunks, both use the minimum over its chunks. The third bound is the time of
    the micro-batches through all stages and back (`_turns`). A memory limit makes these bounds tighter.
    Optimizer steps separate the mini-batches of the same model in rolled families, and of both models in others."""
    n, number = instance.problem.mini_batches, len(instance.problem.models)
    alone = np.zeros((number, n))
    both = np.zeros(n)
    rank_arrival, rank_work = np.full(instance.ranks, np.inf), np.zeros(instance.ranks)
    rank_tail = np.full(instance.ranks, np.inf)
    for k in range(n):
        arrival, tail, b_tail = (np.zeros((number, instance.ranks)) for _ in range(3))
        busy, held = np.zeros((number, instance.ranks)), np.zeros((number, instance.ranks))
        for m in range(number):
            mine = slice(instance.chunks(m).start, instance.chunks(m).stop)
            group = int(instance.group[mine.start])
            first, last = k * group, (k + 1) * group
            earliest = _arrivals(instance, m, first).min(axis=0)
            arrival[m] = np.where(np.isinf(earliest), 0.0, earliest)
            busy[m] = instance.duration[mine, :, :, first:last].sum(axis=(0, 1, 3))
            chained = instance.duration[mine, :W, :, first:last].sum(axis=(0, 1, 3))
            b_tail[m] = instance.tail[mine, B, :, last - 1].min(axis=0)
            # The last pass may be a weight gradient. Nothing waits for it.
            tail[m] = 0.0 if instance.split else b_tail[m]
            alone[m, k] = max((arrival[m] + chained + b_tail[m]).max(), (arrival[m] + busy[m] + tail[m]).max())
            if instance.problem.memory_limit:
                held[m] = _areas(instance, m, first, last)
                alone[m, k] = max(alone[m, k], (arrival[m] + held[m] + b_tail[m]).max())
            alone[m, k] = max(alone[m, k], _turns(instance, m, first, last))
        shared = (arrival.min(axis=0) + held.sum(axis=0) + b_tail.min(axis=0)).max()
        both[k] = max((arrival.min(axis=0) + busy.sum(axis=0) + tail.min(axis=0)).max(), shared, alone[:, k].max())
        if k == 0:
            rank_arrival = arrival.min(axis=0)
        if k == n - 1:
            rank_tail = tail.min(axis=0)
        rank_work += busy.sum(axis=0)
    step = instance.step[:: instance.placement.chunks]
    steps = step * (n - 1)
    chains = float(max(alone[m].sum() + steps[m] for m in range(number)))
    if instance.coupling is Coupling.SERIAL:
        return float(alone.sum() + step.sum() * (n - 1))
    if instance.coupling is Coupling.MINI_BATCH:
        return max(float(both.sum() + steps.min()), chains)
    return max(float((rank_arrival + rank_work + rank_tail).max()), chains)


def _arrivals(instance: SearchInstance, m: int, q: int) -> Floats:
    """The earliest start of each forward of a model's micro-batch q, (chunks, N). It is infinite if a rank holds no
    stage."""
    starts = np.full((len(instance.total), instance.ranks), np.inf)
    for c, rank in instance.nodes(m):
        p, back = instance.before[c, rank]
        come = starts[p, back] + instance.duration[p, F, back, q] + instance.latency[c, F, rank] if back >= 0 else 0.0
        starts[c, rank] = come
    return starts[instance.chunks(m).start : instance.chunks(m).stop]


def _returns(instance: SearchInstance, m: int, first: int, last: int) -> Floats:
    """The least time from the start of a forward to the end of the same stage's B, (chunks, N, micro-batches)."""
    d, result = instance.duration, np.zeros((len(instance.total), instance.ranks, last - first))
    for c, rank in instance.nodes(m)[::-1]:
        result[c, rank] = d[c, F, rank, first:last] + d[c, B, rank, first:last]
        a, onward = instance.after[c, rank]
        if onward >= 0:
            result[c, rank] += instance.latency[a, F, onward] + result[a, onward] + instance.latency[c, B, rank]
    return result[instance.chunks(m).start : instance.chunks(m).stop]


def _areas(instance: SearchInstance, m: int, first: int, last: int) -> Floats:
    """The least time in which each rank can hold a model's micro-batches within the memory limit, (N,).

    It is the sum of each micro-batch's memory times the least time that it is held, divided by the limit. This time is
    counted from the start of a forward to the end of its B, so it lies between the first arrival and the least tail of
    B."""
    mine, limit = slice(instance.chunks(m).start, instance.chunks(m).stop), instance.problem.memory_limit or 0.0
    sizes = instance.activation[mine, :, first:last]
    area: Floats = (sizes * _returns(instance, m, first, last)).sum(axis=(0, 2)) / limit
    return area


def _turns(instance: SearchInstance, m: int, first: int, last: int) -> float:
    """The least time in which micro-batches run through all stages and back. Each one follows the forwards of those
    before it. Those that do not fit in memory together wait for each other.

    A rank that starts the forward of its k-th stage holds the micro-batch in its stages 1 to k until that stage's B
    ends. It holds at least one of them until a weight gradient ends too. Micro-batches pass a stage in order. So if
    those from i to j do not fit together, j starts after i has ended. This gives the earliest starts one after the
    other.

    The rank itself is busy between the first B of i and the start of j. When that B begins, only as many of these
    forwards have ended as fit in memory. When j starts, all but as many as fit have been released. The other passes run
    between, one after the other."""
    mine = slice(instance.chunks(m).start, instance.chunks(m).stop)
    limit = (instance.problem.memory_limit or np.inf) * (1 + 1e-9)
    duration = instance.duration[mine, :, :, first:last]
    absent = instance.position[mine] < 0
    sizes = instance.activation[mine, :, first:last].cumsum(axis=0)
    forwards = duration[:, F].cumsum(axis=0)
    weights = np.minimum.accumulate(duration[:, W], axis=0)
    stay = _returns(instance, m, first, last)
    arrivals = np.stack([_arrivals(instance, m, q) for q in range(first, last)], axis=2)
    begun = arrivals.min(axis=0)[:, 0]
    longest = 0.0
    rows = np.arange(instance.ranks)
    for c in range(len(absent)):
        if absent[c].any():
            continue
        together = np.concatenate([np.zeros((instance.ranks, 1)), sizes[c].cumsum(axis=1)], axis=1)
        # The rank runs one pass at a time. First come all earlier forwards, and those of the stages before this one.
        passed = begun[:, None] + forwards[c].cumsum(axis=1) - duration[c, F]
        start = np.maximum(arrivals[c], passed)
        end = np.zeros_like(start)
        # How many stages of micro-batches fit together, and how long each of the others keeps the rank busy.
        each = np.sort(instance.activation[mine][: c + 1, :, first:last].transpose(1, 0, 2).reshape(len(rows), -1))
        fits = (each.cumsum(axis=1) <= limit).sum(axis=1)
        freeing = duration[: c + 1, B:].sum(axis=1).min(axis=(0, 2))
        entering = duration[: c + 1, F].min(axis=(0, 2))
        for j in range(last - first):
            # The last micro-batch that must have ended, or -1.
            out = (together[:, : j + 1] < (together[:, j + 1] - limit)[:, None]).sum(axis=1) - 1
            if j:
                start[:, j] = np.maximum(start[:, j], start[:, j - 1] + duration[c, F, :, j - 1])
            start[:, j] = np.maximum(start[:, j], np.where(out >= 0, end[rows, out], 0.0))
            others = (c + 1) * (j + 1 - np.arange(j)) - fits[:, None]
            busy = others * freeing[:, None] + (others - 1) * entering[:, None]
            after = np.where(others > 0, start[:, :j] + stay[c, :, :j] - duration[c, B, :, :j] + busy, 0.0)
            start[:, j] = np.maximum(start[:, j], after.max(axis=1, initial=0.0))
            end[:, j] = start[:, j] + stay[c, :, j] + weights[c, :, j]
            if j:
                end[:, j] = np.maximum(end[:, j], end[:, j - 1])
        tail = instance.tail[mine, B, :, first:last][c]
        longest = max(longest, float((start + stay[c] + tail).max()), float(end.max()))
    return longest
