"""Every family in one simulator; the fastest that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dovetail.pipelines.families import DEDICATED, family_names, family_of
from dovetail.pipelines.problem import Problem, ProblemError
from dovetail.pipelines.schedule import Schedule
from dovetail.pipelines.search import Effort, find

Finder = Callable[[Problem, str, Effort], Schedule]


@dataclass(frozen=True)
class Choice:
    """`schedules`: the best of each family that fits; `refused`: why each of the others does not."""

    best: Schedule
    schedules: dict[str, Schedule]
    refused: dict[str, str]

    def loss(self, family: str) -> float:
        """How much longer the family takes than the best: 0.08 is 8 % longer."""
        return self.schedules[family].makespan / self.best.makespan - 1


def _find(problem: Problem, family: str, effort: Effort) -> Schedule:
    return find(problem, family_of(family), effort)


def choose(problem: Problem, effort: Effort, families: Sequence[str] | None = None, finder: Finder = _find) -> Choice:
    """The fastest family within the memory limit; equal ones by less memory, then by the order of `families` (default:
    all).

    `effort.seconds` is shared among the searched families. Raises ProblemError where none fits."""
    names = list(families or [*family_names(problem), *([DEDICATED.name] if problem.ranks > 1 else [])])
    searched = sum(not family_of(n).fixed for n in names)
    share = replace(effort, seconds=effort.seconds / max(1, searched))
    found: dict[str, Schedule] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            found[name] = finder(problem, name, share)
        except ProblemError as error:
            refused[name] = str(error)
    if not found:
        raise ProblemError("no family fits: " + "; ".join(refused.values()))
    best = min(found.values(), key=lambda s: (round(s.makespan, 9), s.peak))
    return Choice(best, found, refused)
