"""Searches several families or memory limits, and keeps the answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.pipelines.bound import lower_bound
from dovetail.pipelines.families import DEDICATED, family_instance, family_names, family_of, starts
from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.problem import ProblemError, ScheduleProblem
from dovetail.pipelines.schedule import DeadlockError, Schedule, evaluate
from dovetail.pipelines.search.find import find
from dovetail.pipelines.search.rounds import SearchEffort

VERSION = 2
"""The version of the search. Answers that an older version has kept are not used."""
Finder = Callable[[ScheduleProblem, str, SearchEffort], Schedule]


def _find(problem: ScheduleProblem, family: str, effort: SearchEffort) -> Schedule:
    return find(problem, family_of(family, len(problem.models)), effort)


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
    problem: ScheduleProblem, effort: SearchEffort, families: Sequence[str] | None = None, finder: Finder = _find
) -> Choice:
    """The fastest schedule of `families` (default: all) within the memory limit. If schedules are equally fast, the one
    with less memory wins, and then the first one.

    The searched families share `effort.seconds`. Families that are seldom the fastest come last. Such a family is
    searched, for as long as any other, only if its bound is below the best makespan so far. Otherwise `choose` compares
    its best schedule that a rule builds. Raises ProblemError if no family fits."""
    models = len(problem.models)
    names = list(families or [*family_names(problem), *([DEDICATED.name] if problem.ranks > 1 < models else [])])
    those = {name: family_of(name, models) for name in names}
    searched = sum(not (family.fixed or family.seldom) for family in those.values())
    share = replace(effort, seconds=effort.seconds / max(1, searched))
    found: dict[str, Schedule] = {}
    refused: dict[str, str] = {}
    for name in sorted(names, key=lambda name: those[name].seldom):
        family = those[name]
        try:
            if family.seldom and found:
                instance, reached = family_instance(problem, family), min(s.makespan for s in found.values())
                known = _by_rule(instance, name) if lower_bound(instance) >= reached * (1 - 1e-9) else None
                if known is not None:
                    found[name] = known
                    continue
            found[name] = finder(problem, name, share)
        except ProblemError as error:
            refused[name] = str(error)
    if not found:
        raise ProblemError("no family fits: " + "; ".join(refused.values()))
    best = min(found.values(), key=lambda s: (round(s.makespan, 9), s.peak))
    return Choice(best, {n: found[n] for n in names if n in found}, refused)


def _by_rule(instance: SearchInstance, name: str) -> Schedule | None:
    """The fastest schedule that a rule builds within the memory limit, or None."""
    found = []
    for orders in starts(instance):
        with contextlib.suppress(DeadlockError):
            found.append(evaluate(instance, orders, name, "rule"))
    return min((s for s in found if s.fits(instance.problem.memory_limit)), key=lambda s: s.makespan, default=None)


def pareto(
    problem: ScheduleProblem, family: str, effort: SearchEffort, points: int = 6, finder: Finder = _find
) -> list[Schedule]:
    """The Pareto front of one family, makespan against peak activation memory. No schedule in the front is both faster
    and smaller than another. The fastest comes first.

    The first schedule is the fastest within the problem's own limit. The others keep to lower limits, evenly spaced
    from its peak down to the least memory that any schedule needs. The `points` share `effort.seconds`. Raises
    ProblemError if no schedule fits."""
    if points < 1:
        raise ProblemError(f"points is {points}; a front has at least 1")
    share = replace(effort, seconds=effort.seconds / points)
    found = [finder(problem, family, share)]
    least, step = problem.least_memory, (found[0].peak - problem.least_memory) / max(1, points - 1)
    limit = found[0].peak
    while step > 0 and limit > least * (1 + 1e-9) and len(found) < points:
        # The limits fall in even steps, and always below the peak that was reached already.
        limit = max(least, min(limit - step, found[-1].peak * (1 - 1e-6)))
        try:
            found.append(finder(replace(problem, memory_limit=limit), family, share))
        except ProblemError:
            break  # less memory will not help
    return front(found)


def front(schedules: list[Schedule]) -> list[Schedule]:
    """The schedules that no other schedule beats in both time and memory, fastest first."""
    kept: list[Schedule] = []
    for schedule in sorted(schedules, key=lambda s: (round(s.makespan, 9), s.peak)):
        if not kept or schedule.peak < kept[-1].peak * (1 - 1e-9):
            kept.append(schedule)
    return kept


def cached_find(
    problem: ScheduleProblem, family: str, effort: SearchEffort, store: MutableMapping[str, str]
) -> Schedule:
    """Calls `find`, and keeps the answer in `store` under a hash of problem, family and effort.

    A kept answer is simulated again. An entry that is damaged or belongs to another problem is searched for anew."""
    if family_of(family, len(problem.models)).fixed:
        return _find(problem, family, effort)
    key = hashlib.sha256(
        json.dumps([VERSION, problem.digest, family, effort.seed, effort.seconds, effort.scale, effort.memory]).encode()
    ).hexdigest()
    known = _read(problem, family, store.get(key))
    if known is not None:
        return replace(known, seed=effort.seed)
    found = _find(problem, family, effort)
    store[key] = json.dumps({"orders": found.orders.tolist(), "how": found.how, "makespan": found.makespan})
    return found


def _read(problem: ScheduleProblem, family: str, text: str | None) -> Schedule | None:
    """A kept answer, or None if it does not belong to the problem."""
    try:
        entry = json.loads(text or "")
        instance = family_instance(problem, family_of(family, len(problem.models)))
        orders = np.array(entry.get("orders") or entry["words"], dtype=np.int64)
        if not instance.holds(orders):
            return None
        found = evaluate(instance, orders, family, str(entry["how"]))
        same = found.peaks.min() >= 0 and abs(found.makespan - entry["makespan"]) <= 1e-6 * found.makespan
        return found if same else None
    except (ValueError, KeyError, TypeError, DeadlockError):
        return None
