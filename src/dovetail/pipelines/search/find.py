"""Searches for the shortest makespan, and then for less memory at that makespan. RLHFuse (section 5.2) anneals instead.

1. A list scheduler lists the problem and its mirror image in time, by random priority rules.
2. The best of these schedules are improved under a limit of activation memory, by justification if backwards are split,
   and by annealing on the critical path. If there are many micro-batches, a schedule of a few is found, and its steady
   state is repeated. For many ranks there are dispatch rules and a schedule of fewer ranks that is stretched. If memory
   is scarce too, there is a schedule whose larger model never waits.
3. If OR-Tools is installed, CP-SAT tries what these do not reach. It also proves that nothing is faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from dovetail.pipelines.bound import lower_bound
from dovetail.pipelines.families import Family, family_instance, fixed_orders, fixed_schedule, starts
from dovetail.pipelines.instance import Coupling, SearchInstance
from dovetail.pipelines.problem import ProblemError, ScheduleProblem, serial_memory
from dovetail.pipelines.schedule import DeadlockError, Schedule, evaluate
from dovetail.pipelines.search.dispatch_rules import UNLIMITED, DispatchSearch
from dovetail.pipelines.search.exact import time_unit
from dovetail.pipelines.search.levels import (
    CLOSING,
    DISPATCH_ROUNDS,
    LATENCY,
    MEMORY,
    NEAR,
    POLISH,
    SPARES,
    SPLIT_LATENCY,
    THINNED,
    Level,
)
from dovetail.pipelines.search.no_wait import no_wait
from dovetail.pipelines.search.rounds import LARGE, Rounds, SearchEffort, rank
from dovetail.pipelines.search.scaling import fewer_ranks, many_ranks, stretch
from dovetail.pipelines.search.steady_state import drop, one_mini_batch, restore, shorten, unroll
from dovetail.pipelines.simulate import Ints

Known = tuple[Ints, str]
"""Orders, and the method that found them."""


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

    def run(self, known: Sequence[Known]) -> Schedule | None:
        limit = self.instance.problem.memory_limit
        cap = UNLIMITED if limit is None else limit
        for orders, how in self._starts(cap, known):
            self.keep(orders, how)
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

    def _starts(self, cap: float, known: Sequence[Known]) -> Iterable[Known]:
        """The known schedules and those that a rule builds, if they fit. The search never ends with a worse one."""
        for start, how in (*known, *((orders, "rule") for orders in starts(self.instance))):
            try:
                if evaluate(self.instance, start).fits(cap):
                    yield start, how
            except DeadlockError:
                continue

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


def _unrolled(problem: ScheduleProblem, family: Family, effort: SearchEffort, pool: ThreadPoolExecutor) -> Ints | None:
    """Orders from a schedule of fewer micro-batches, found in a third of the time."""
    fewer = shorten(problem, family)
    if fewer is None:
        return None
    part = replace(effort, seconds=effort.seconds / 3)
    found = _Search(family_instance(fewer, family), family, part, pool).run([])
    longer = None if found is None else unroll(problem, family, found)
    return None if longer is None else longer.orders


def _repeated(problem: ScheduleProblem, family: Family, effort: SearchEffort) -> Ints | None:
    """The orders of one mini-batch as often as there are mini-batches, found in half of the time."""
    part = replace(effort, seconds=effort.seconds / 2, memory=False, progress=None)
    try:
        found = find(one_mini_batch(problem), family, part)
    except ProblemError:
        return None
    return np.tile(found.orders, problem.mini_batches)


def _stretched(problem: ScheduleProblem, family: Family, effort: SearchEffort, pool: ThreadPoolExecutor) -> list[Ints]:
    """Orders from a schedule of fewer ranks, found in a third of the time."""
    fewer = fewer_ranks(problem, family)
    if fewer is None:
        return []
    part = replace(effort, seconds=effort.seconds / 3, memory=False)
    found = _Search(family_instance(fewer, family), family, part, pool).run([])
    return [] if found is None else stretch(family_instance(problem, family), found)


def _dispatched(instance: SearchInstance, effort: SearchEffort, share: float, pool: ThreadPoolExecutor) -> Ints | None:
    """Orders that a dispatch rule lists, found in a share of the time."""
    search, begun = DispatchSearch(instance, effort.seed), effort.clock()
    for number in range(max(1, int(DISPATCH_ROUNDS * effort.scale))):
        if number and (effort.clock() - begun > share * effort.seconds or search.makespan <= lower_bound(instance)):
            break
        search.round(pool)
    return search.best


def _known(
    instance: SearchInstance, family: Family, effort: SearchEffort, pool: ThreadPoolExecutor
) -> Iterable[tuple[Ints | None, str]]:
    """Orders that the search of a large problem starts from."""
    problem = instance.problem
    large = instance.ranks * instance.length > LARGE
    # If the models meet between mini-batches of equal times, nothing is faster than to repeat the best one.
    if problem.mini_batches > 1 and (large or instance.coupling is not Coupling.ROLLED):
        yield _repeated(problem, family, effort), "rule"
    yield _unrolled(problem, family, effort, pool), "period"
    # Dispatch rules weigh two models against each other.
    separate = instance.coupling is Coupling.SERIAL or len(problem.models) == 1
    if not many_ranks(problem) or separate or not large:
        yield from ((orders, "stretched") for orders in _stretched(problem, family, effort, pool))
    if many_ranks(problem) and not separate:
        begun = effort.clock()
        yield no_wait(instance, lambda: effort.seconds / 4 - (effort.clock() - begun)), "no wait"
        share = 0.9 if large else 1 / 3
        yield _dispatched(instance, effort, share, pool), "dispatch"


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
        start_orders = start.orders if start is not None and instance.holds(start.orders) else None
        known = [(start_orders, "rule"), *_known(instance, family, effort, pool)]
        left = replace(effort, seconds=effort.seconds - (effort.clock() - started))
        best = _Search(instance, family, left, pool).run([(o, how) for o, how in known if o is not None])
    if best is None:
        raise ProblemError(
            f"no {family.name} schedule within a memory limit of {problem.memory_limit:g} was found; serial 1F1B takes "
            f"{serial_memory(problem):g} and one micro-batch at a time {problem.least_memory:g}"
        )
    return replace(best, seconds=effort.clock() - started)
