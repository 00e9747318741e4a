"""A look at every placement, to test our search by, and our search of what the papers' systems allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dovetail.planner.search import (
    EVERY,
    Effort,
    Limits,
    Misfit,
    Ranked,
    Result,
    Search,
    orders,
)
from dovetail.planner.seconds import GPUCosts, Option
from papers.free_placements import FreeLimits, FreeSearch


def search_of(limits: Limits, costs: GPUCosts, effort: Effort) -> Search:
    """Our search, of what our software runs or of everything."""
    return FreeSearch(limits, costs, effort) if isinstance(limits, FreeLimits) else Search(limits, costs, effort)


def exhaustive(limits: Limits, costs: GPUCosts) -> Result:
    """Every structure, every combination of layouts, every schedule and threshold: for small cases, and to test by."""
    search = search_of(limits, costs, Effort(estimates=10**12))
    for structure in search.structures():
        ranking = search.ranker.rank(structure, EVERY)
        if isinstance(ranking, Misfit):
            continue
        mine = search.combine(ranking, search.ranker)
        for options in combinations(ranking.layouts):
            chosen = tuple(option.share for option in options)
            if not mine.agrees(chosen):
                continue
            for schedule in mine.schedules(chosen):
                for migration in limits.migrations:
                    candidate = mine.candidate(chosen, schedule)
                    search.estimated(replace(candidate, migration=migration))
    return search.result


def combinations(layouts: Sequence[Ranked]) -> Iterator[tuple[Option, ...]]:
    """One option of each list, by the sum of their seconds; each combination once."""
    for at in orders(layouts):
        yield tuple(ranked[i] for ranked, i in zip(layouts, at, strict=True))
