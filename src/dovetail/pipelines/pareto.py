"""The front of makespan against peak activation memory of one family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dovetail.pipelines.families import Family
from dovetail.pipelines.problem import Problem, ProblemError
from dovetail.pipelines.schedule import Schedule
from dovetail.pipelines.search import Effort, find

Finder = Callable[[Problem, Family, Effort], Schedule]


def pareto(problem: Problem, family: Family, effort: Effort, points: int = 6, finder: Finder = find) -> list[Schedule]:
    """Schedules none of which is both faster and smaller than another, fastest first.

    The fastest within the problem's own limit, then the fastest at limits evenly spaced from its peak down to the least
    that any schedule needs; `effort.seconds` is shared among the `points`. Raises ProblemError where nothing fits."""
    if points < 1:
        raise ProblemError(f"points is {points}; a front has at least 1")
    share = replace(effort, seconds=effort.seconds / points)
    found = [finder(problem, family, share)]
    least, step = problem.least_memory, (found[0].peak - problem.least_memory) / max(1, points - 1)
    limit = found[0].peak
    while step > 0 and limit > least * (1 + 1e-9) and len(found) < points:
        # Beside the even steps, never again what was reached already.
        limit = max(least, min(limit - step, found[-1].peak * (1 - 1e-6)))
        try:
            found.append(finder(replace(problem, memory_limit=limit), family, share))
        except ProblemError:
            break  # less memory will not help
    return front(found)


def front(schedules: list[Schedule]) -> list[Schedule]:
    """Those that no other one beats in both, fastest first."""
    kept: list[Schedule] = []
    for schedule in sorted(schedules, key=lambda s: (round(s.makespan, 9), s.peak)):
        if not kept or schedule.peak < kept[-1].peak * (1 - 1e-9):
            kept.append(schedule)
    return kept
