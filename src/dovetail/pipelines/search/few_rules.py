"""The search that needs no compiled kernels: a few priority rules, listed in plain Python.

To import numba and to load or compile the kernels takes longer than a small problem is worth. This search takes
a tenth of a second or so for two ranks. It has random numbers of its own, so its answer depends on the problem and the
seed alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dovetail.pipelines.bound import lower_bound
from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.search.listing import list_schedule
from dovetail.pipelines.simulate import KINDS, B, Floats, Ints, W

TRIES, PASSES = 150, 15_000
"""It lists at most so many schedules, and so many passes."""
_FIRST = [  # of the first tries: a rank's micro-batches beyond 1F1B's, which model leads, by how much
    (extra, first, lead) for extra in (0, 1, 2, -1) for first in (0, 1) for lead in (0.0, 0.3, 3.0)
][:12]


class _Rule(NamedTuple):
    """`base`, `slope` (C, 3, N), `room` (N, C), `look` (C, 3) as in `search_rules`; `weights`: its patience and its
    lateness."""

    base: Floats
    slope: Floats
    room: Ints
    look: Floats
    weights: Floats


def few_rules(instance: SearchInstance, limit: float, seed: int) -> Ints | None:
    """The orders of the fastest schedule that some rules and changes of the best of them give within the memory limit,
    or None. It ends at the instance's lower bound."""
    random, bound = np.random.RandomState(seed), lower_bound(instance) * (1 + 1e-9)
    progress, number = (np.zeros((len(instance.total), 1, 1, instance.duration.shape[3])) for _ in range(2))
    for c, (total, group) in enumerate(zip(instance.total, instance.group, strict=True)):
        q = np.arange(total)
        progress[c, 0, 0, :total], number[c, 0, 0, :total] = (q % group + 0.5) / group, q // group
    orders, best_orders = np.zeros((2, instance.ranks, instance.length), np.int64)
    finish = np.zeros_like(instance.duration)
    best, kept = np.inf, None
    for trial in range(max(len(_FIRST), min(TRIES, PASSES // orders.size))):
        rule = _first(instance, *_FIRST[trial]) if trial < len(_FIRST) else _changed(instance, kept, random)
        patience, lateness = rule.weights
        keys = rule.base[..., None] + rule.slope[..., None] * progress + lateness * number
        end = list_schedule.plain(
            instance.duration, instance.before, instance.after, instance.total, instance.group, instance.wait,
            instance.step, instance.latency, instance.activation, instance.form, limit, rule.room, keys, patience,
            1e300, rule.look, best, finish, orders,
        )  # fmt: skip
        if kept is None or 0 <= end <= best:
            kept = rule
        if 0 <= end < best:
            best, best_orders = end, orders.copy()
        if best <= bound:
            break
    return best_orders if best < np.inf else None


def _first(instance: SearchInstance, extra: int, first: int, lead: float) -> _Rule:
    """Backwards before forwards before weight gradients, and the mini-batches one after the other."""
    base = np.zeros((len(instance.total), KINDS, instance.ranks))
    base[:, B], base[:, W] = -3.0, 3.0
    for model in range(len(instance.problem.models)):
        if model != first:
            base[instance.chunks(model).start : instance.chunks(model).stop] += lead
    room = np.maximum(1, (instance.stages[:, None] - instance.position).T + extra)
    return _Rule(base, np.ones_like(base), room, np.zeros(base.shape[:2]), np.array([0.0, 10.0]))


def _changed(instance: SearchInstance, kept: _Rule | None, random: np.random.RandomState) -> _Rule:
    assert kept is not None
    rule = _Rule(kept.base.copy(), kept.slope.copy(), kept.room.copy(), kept.look.copy(), kept.weights.copy())
    codes, ranks, unit = rule.look.shape, instance.ranks, float(instance.duration[:, 0].max())

    def change() -> Floats:
        drawn: Floats = 0.5 * random.standard_normal(codes) * (random.random_sample(codes) < 0.3)
        return drawn

    rule.base[:] += change()[..., None]
    rule.slope[:] += change()[..., None]
    rule.base[:] += change()[..., None] * (instance.position / instance.stages[:, None])[:, None]
    shift = (random.random_sample(codes) - 0.5) * unit * (random.random_sample(codes) < 0.15)
    np.maximum(0.0, rule.look + shift, out=rule.look)
    step = random.randint(-1, 2, codes[0]) * (random.random_sample(codes[0]) < 0.2)
    np.maximum(1, rule.room + step, out=rule.room)
    scale = np.array([0.1 / unit, 3.0])
    rule.weights[:] = np.abs(rule.weights + scale * random.standard_normal(2) * (random.random_sample(2) < 0.2))
    if random.random_sample() < 0.5:  # one rank alone
        rule.base[random.randint(codes[0]), random.randint(KINDS), random.randint(ranks)] += random.standard_normal()
    return rule
