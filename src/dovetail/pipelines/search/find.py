"""Searches a family for the shortest makespan, and then for less memory at that makespan. Compares families.

1. A list scheduler lists the problem and its mirror image in time, by random priority rules.
2. The best of these schedules are improved under a limit of activation memory, by justification if backwards are split,
   and by annealing on the critical path. Some are found without the larger model's steady state, which is then
   repeated: they need less memory.
3. If OR-Tools is installed, CP-SAT tries what these do not reach. It also proves that nothing is faster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dovetail.pipelines.bound import lower_bound
from dovetail.pipelines.compat import COMPILED
from dovetail.pipelines.families import (
    DEDICATED,
    Family,
    family_instance,
    family_names,
    family_of,
    fixed_orders,
    fixed_schedule,
    starts,
)
from dovetail.pipelines.instance import Coupling, SearchInstance
from dovetail.pipelines.problem import ProblemError, ScheduleProblem, serial_memory
from dovetail.pipelines.schedule import DeadlockError, Schedule, evaluate
from dovetail.pipelines.search.exact import time_unit
from dovetail.pipelines.search.listing import list_schedule
from dovetail.pipelines.search.rounds import LARGE, UNLIMITED, Level, Rounds, SearchEffort, rank
from dovetail.pipelines.search.steady_state import drop, mean_model, restore
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


Finder = Callable[[ScheduleProblem, str, SearchEffort], Schedule]
LATENCY = (
    Level(1 / 16, rules=1),
    Level(1 / 4, rules=1),
    Level(1 / 2, thin=1, work=0.3, runs=2),
    Level(rules=1),
    Level(thin=2),
    Level(rules=1, annealing=6, work=2.5, runs=4),
)
SPLIT_LATENCY = (  # with three kinds of passes, rules and justification find more than thinned problems
    Level(1 / 16, rules=1),
    *[Level(1 / 8, rules=1, justifying=2)] * 4,  # from new rules each time
    Level(1 / 2, rules=1, justifying=4),
    Level(1 / 4, annealing=1),
    Level(rules=1),
    Level(1 / 4, annealing=2),
    Level(1 / 2, thin=1, work=0.3, runs=2),
    Level(rules=2),
    Level(thin=2),
    Level(rules=1, annealing=6, work=2.5, runs=4),
)
MEMORY = (
    Level(1 / 16, rules=1),
    Level(1 / 2, thin=2),
    Level(1 / 2, thin=4),
    Level(work=0.7, runs=4),
    Level(1 / 4, rules=1),
    Level(1 / 2, thin=8),
    Level(work=6.0, runs=2),
    Level(rules=1),
    Level(rules=1, annealing=3),
    Level(1 / 2, thin=16),
    Level(rules=2, annealing=5),
    Level(work=5.0, runs=8),
)
THINNED = (
    Level(1 / 16, rules=1),
    Level(1 / 2, rules=1),
    Level(1 / 4, annealing=2, near=1.015),
    Level(rules=1),
)
SPARES = (2, 1, 2, 3)
"""The micro-batches that the larger model keeps beyond its warm-up, in quarters of its stages. They are tried in
turn."""
POLISH = 1.01
"""A repeated steady state that ends within this factor of the target is annealed."""
CLOSING = Level(work=2.5, runs=4)
NEAR = 1.05
"""CP-SAT looks for a schedule at the bound only if the best one is within this factor of it."""


class _Search(Rounds):
    def without_steady_state(self, limit: float, target: float, level: Level, most: float = 0.0) -> bool:
        """Whether a schedule without the larger model's steady state was found that becomes one of `target` within
        `limit` when the steady state is restored. A makespan below `most` is kept, even if it is above `target`."""
        for number in range(level.thin):
            fewer = drop(self.instance.problem, SPARES[number % len(SPARES)])
            if (self.rounds or self.long) and self.left() <= 0:
                return False
            if fewer is None:
                continue
            self.rounds += 1
            instance = family_instance(replace(fewer, memory_limit=None), self.family)
            # Both bounds are without limits. What the limit adds to the bound of the whole problem does not hold for a
            # part.
            whole = family_instance(replace(self.instance.problem, memory_limit=None), self.family)
            shift = lower_bound(whole) - lower_bound(instance)
            effort = replace(self.effort, seconds=self.left(), seed=self.seed(number), progress=None)
            search = Rounds(instance, self.family, effort, self.pool)
            for step in THINNED:
                near = search.best is not None and search.best.makespan + shift <= target * step.near
                if step.part > level.part or (step.annealing and not near):
                    continue
                short = search.attempt(limit, target - shift, step)
                if short is None or short.makespan + shift > max(target, most) * (1 + 1e-9):
                    continue
                longer = restore(self.instance, short, limit)
                if longer is not None:
                    found = self.keep(longer, "steady state")
                    self.report("steady state")
                    if found.makespan > target * (1 + 1e-9) and found.makespan <= target * POLISH:
                        found = min([found, *self.anneal([found], limit, target, step.part)], key=rank)
                    if found.makespan <= target * (1 + 1e-9):
                        return True
                    most = min(most, found.makespan * (1 - 1e-6))
                if short.makespan + shift <= target * (1 + 1e-9):
                    break
        return False

    def run(self, known: Iterable[Ints]) -> Schedule | None:
        limit = self.instance.problem.memory_limit
        cap = UNLIMITED if limit is None else limit
        # The search never ends with a schedule that is worse than those that are known or built by a rule.
        for orders in (*known, *starts(self.instance)):
            with contextlib.suppress(DeadlockError):
                if evaluate(self.instance, orders).fits(cap):
                    self.keep(orders, "rule")
        if not (COMPILED and self.effort.compiled):
            if not (self.best is not None and self.best.at_bound):
                listed = few_rules(self.instance, cap * (1 + 1e-9), self.effort.seed)
                if listed is not None:
                    self.keep(listed, "rules")
            return self.best
        for level in SPLIT_LATENCY if self.family.split else LATENCY:
            if self.best is not None and self.best.at_bound:
                break
            self.attempt(cap, self.bound, level)
            if level.thin and not (self.best is not None and self.best.at_bound):
                most = UNLIMITED if self.best is None else self.best.makespan
                self.without_steady_state(cap, self.bound, level, most)
            near = self.best is None or (not self.best.at_bound and self.best.makespan <= self.bound * NEAR)
            if level.work and near and self.proved <= self.bound:
                self._prove(cap, self.bound, level.work, level.runs)
        if self.best is None:
            return None
        if self.effort.memory:
            self._less_memory(serial_memory(self.instance.problem))
        if self.proved < self.best.makespan:
            self._close(cap)
        return replace(self.best, proved=self.proved)

    def _prove(self, cap: float, target: float, work: float, runs: int) -> bool:
        """Whether CP-SAT found a schedule of `target`, or proved that all are slower."""
        answer = self.exact(cap, target, work, runs)
        if answer.impossible:
            unit = time_unit(self.instance)
            if unit is not None:
                self.proved = max(self.proved, unit * (np.floor(target / unit + 1e-6) + 1))
        return answer.impossible or answer.orders is not None

    def _close(self, cap: float) -> None:
        """Narrow the gap between what is proved and what was found, while CP-SAT answers."""
        unit = time_unit(self.instance)
        if unit is None:
            return
        while self.best is not None and self.left() > 0:
            low, high = max(self.bound, self.proved), self.best.makespan
            if high <= low * (1 + 1e-9):
                return
            middle = float(max(low, min(high - unit, unit * np.floor((low + high) / 2 / unit + 1e-6))))
            if not any(
                self._prove(cap, target, CLOSING.work, CLOSING.runs) for target in dict.fromkeys((middle, high - unit))
            ):
                return

    def _less_memory(self, serial: float) -> None:
        """Search for less memory at the same makespan, down to that of serial 1F1B or to what is enough. The search is
        a bisection between the limit that failed and the one that was reached.

        What can be found is often found at once, and a failure takes a whole round. So rounds begin small."""
        assert self.best is not None
        target = self.best.makespan
        goal = max(serial * 1.0045, self.effort.enough)  # 1.00 in two decimals
        impossible = 0.0
        for level in MEMORY:
            failed = impossible
            while self.left() > 0 and self.best.peak > max(goal, failed * 1.01):
                trial = goal if not failed else (failed + self.best.peak) / 2
                if level.thin:
                    reached = self.without_steady_state(trial, target, level)
                elif level.work:
                    answer = self.exact(trial, target, level.work, level.runs)
                    if answer.impossible:
                        impossible = trial
                    reached = answer.orders is not None
                else:
                    found = self.attempt(trial, target, level)
                    reached = found is not None and found.makespan <= target * (1 + 1e-9)
                if not reached:
                    failed = trial
                    if level.work:  # CP-SAT takes long to fail, and seldom decides a limit nearby
                        break


def _repeated(problem: ScheduleProblem, family: Family, effort: SearchEffort) -> Ints | None:
    """The orders of one mini-batch as often as there are mini-batches, found in half of the time. Times are the mean
    over micro-batches."""
    part = replace(effort, seconds=effort.seconds / 2, memory=False, progress=None)
    models = tuple(mean_model(problem, index, m.micro_batches) for index, m in enumerate(problem.models))
    try:
        found = find(replace(problem, models=models, mini_batches=1), family, part)
    except ProblemError:
        return None
    return np.tile(found.orders, problem.mini_batches)


def find(problem: ScheduleProblem, family: Family, effort: SearchEffort, start: Schedule | None = None) -> Schedule:
    """The family's fastest schedule within the problem's memory limit. Of equally fast ones it has the lowest peak
    memory.

    `start`: a known schedule to improve, for example a schedule of the same problem with other times. It is ignored if
    it does not hold the passes of this problem. Raises ProblemError if no schedule within the limit is found."""
    started = effort.clock()
    if family.fixed:
        return replace(fixed_schedule(problem, family), seconds=effort.clock() - started)
    instance = family_instance(problem, family)
    if family.capped:
        own = evaluate(instance, fixed_orders(instance, family)).peak
        problem = replace(problem, memory_limit=own if problem.memory_limit is None else min(own, problem.memory_limit))
        instance = family_instance(problem, family)
    with ThreadPoolExecutor(effort.workers) as pool:
        known = [start.orders] if start is not None and instance.holds(start.orders) else []
        # If the models meet between mini-batches of equal times, nothing is faster than to repeat the best one.
        large = instance.ranks * instance.length > LARGE
        if problem.mini_batches > 1 and (large or instance.coupling is not Coupling.ROLLED):
            again = _repeated(problem, family, effort)
            known += [] if again is None else [again]
        left = replace(effort, seconds=effort.seconds - (effort.clock() - started))
        best = _Search(instance, family, left, pool).run(known)
    if best is None:
        raise ProblemError(
            f"no {family.name} schedule within a memory limit of {problem.memory_limit:g} was found; serial 1F1B takes "
            f"{serial_memory(problem):g} and one micro-batch at a time {problem.least_memory:g}"
        )
    return replace(best, seconds=effort.clock() - started)


@dataclass(frozen=True)
class Choice:
    """`schedules`: the best schedule of each family that fits. `refused`: why the other families do not fit."""

    best: Schedule
    schedules: dict[str, Schedule]
    refused: dict[str, str]

    def loss(self, family: str) -> float:
        """The fraction by which the family takes longer than the best one. 0.08 means 8 % longer."""
        return self.schedules[family].makespan / self.best.makespan - 1


def choose(
    problem: ScheduleProblem, effort: SearchEffort, families: Sequence[str] | None = None, finder: Finder | None = None
) -> Choice:
    """The fastest schedule of `families` (default: all) within the memory limit. If schedules are equally fast, the one
    with less memory wins, and then the first one.

    The searched families share `effort.seconds`. Raises ProblemError if no family fits."""
    models = len(problem.models)
    names = list(families or [*family_names(problem), *([DEDICATED.name] if problem.ranks > 1 < models else [])])
    searched = sum(not family_of(name, models).fixed for name in names)
    share = replace(effort, seconds=effort.seconds / max(1, searched))
    found: dict[str, Schedule] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            found[name] = (
                find(problem, family_of(name, models), share) if finder is None else finder(problem, name, share)
            )
        except ProblemError as error:
            refused[name] = str(error)
    if not found:
        raise ProblemError("no family fits: " + "; ".join(refused.values()))
    best = min(found.values(), key=lambda s: (round(s.makespan, 9), s.peak))
    return Choice(best, found, refused)
