"""Ways to choose a placement, by name: ours, those of the papers that it is compared with, and a look at everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from dovetail.planner.candidate import Candidate, Placement, Share, Task
from dovetail.planner.inventory import Inventory
from dovetail.planner.search import (
    ALONE,
    EVERY,
    Combinations,
    Effort,
    Limits,
    Misfit,
    Ranked,
    Ranker,
    Ranking,
    Result,
    Search,
    Sizes,
    Slots,
    every_size,
    orders,
    sizes,
)
from dovetail.planner.seconds import GPUCosts, Option
from papers.free_placements import FreeLimits, FreeRanker, FreeSearch
from papers.layouts import ranks_of, similar
from papers.routing import RankGrid

Strategy = Literal["search", "prior", "grid", "similar", "exhaustive"]
STRATEGIES: tuple[Strategy, ...] = ("search", "prior", "grid", "similar", "exhaustive")
# APP section V-C: 30 to 50 % of the devices to the predicting actor and to the training models each.
PRIOR = (0.3, 0.5)
# Placement ratios of APP's grid.
GRID = (0.25, 0.5, 0.75, 1.0)


def choose(strategy: Strategy, limits: Limits, costs: GPUCosts, effort: Effort) -> Result:
    """search: ours. prior, grid: APP's two modes, over placements that its rules or its grid of ratios allow. similar:
    everything on all GPUs, generation's layout by PUZZLE's descent from the best training layout. exhaustive: all."""
    if strategy == "exhaustive":
        return exhaustive(limits, costs)
    if strategy == "similar":
        return _similar(limits, costs, effort)
    if strategy == "search":
        return search_of(limits, costs, effort).run()
    return {"prior": _Prior, "grid": _Grid}[strategy](free(limits), costs, effort).run()


def free(limits: Limits) -> FreeLimits:
    """The papers' strategies place tasks in more ways than our software runs."""
    assert isinstance(limits, FreeLimits)
    return limits


def search_of(limits: Limits, costs: GPUCosts, effort: Effort) -> Search:
    """Our search, of what our software runs or of everything."""
    return FreeSearch(limits, costs, effort) if isinstance(limits, FreeLimits) else Search(limits, costs, effort)


class _Prior(FreeSearch):
    """Only structures that APP's rule allows."""

    def structures(self, grid: Sizes) -> Iterator[Candidate]:
        return (found for found in super().structures(grid) if _prior(found, self.costs.inventory))


class _Grid(FreeSearch):
    """Only structures on APP's grid."""

    def structures(self, grid: Sizes) -> Iterator[Candidate]:
        return (found for found in super().structures(grid) if _on_grid(found, self.costs.inventory))


def _count(slots: Slots) -> int:
    return sum(slot.gpus for slot in slots)


def _prior(structure: Candidate, inventory: Inventory) -> bool:
    """Separation with the shares of PRIOR; the rest infers, if there is one."""
    training = set(structure.actor_training) | set(structure.critic_training)
    trains, generates = _count(tuple(training)), _count(structure.generation)
    low, high = (share * inventory.gpus for share in PRIOR)
    separate = structure.placement is Placement.SEPARATION or ALONE in structure.note
    return separate and low <= trains <= high and low <= generates <= high


def _on_grid(structure: Candidate, inventory: Inventory) -> bool:
    tasks = (structure.generation, structure.actor_training, structure.critic_training, structure.reference)
    ratios = (_count(slots) / inventory.gpus for slots in (*tasks, structure.reward, structure.critic) if slots)
    return all(any(abs(ratio - point) < 1e-9 for point in GRID) for ratio in ratios)


def _similar(limits: Limits, costs: GPUCosts, effort: Effort) -> Result:
    search = FreeSearch(replace(free(limits), placements=(Placement.FLATTENING,)), costs, effort)
    for structure in search.structures(sizes):
        ranking = search.ranker.rank(structure, EVERY)
        # Layouts are of the same ranks; pools that only generate have none in common with training.
        if isinstance(ranking, Ranking) and structure.generation == structure.actor_training:
            _descend(search, search.combine(ranking, search.ranker))
    return search.result


def _descend(search: Search, mine: Combinations) -> None:
    """Once with each task's fastest ways to hold a layout, once with those that need least memory."""
    ranking = mine.ranking
    places = [task for task, _ in ranking.places]
    actor, served = places.index("actor_training"), places.index("generation")
    orders: tuple[Callable[[Option], float], ...] = (lambda option: option.seconds, lambda option: option.need)
    for order in orders:
        ordered = [sorted(ranked, key=order) for ranked in ranking.layouts]
        trains = {ranks_of(option.share): option for option in reversed(ordered[actor])}
        serves = {ranks_of(option.share): option for option in reversed(ordered[served])}
        chosen = [ranked[0].share for ranked in ordered]
        found = _puzzle(search, mine, chosen, (actor, served), (trains, serves))
        search.estimated(found)


def _puzzle(
    search: Search,
    mine: Combinations,
    chosen: list[Share],
    at: tuple[int, int],
    layouts: tuple[dict[RankGrid, Option], dict[RankGrid, Option]],
) -> Candidate:
    trains, serves = layouts

    def candidate(training: RankGrid, generation: RankGrid) -> Candidate:
        both = {at[0]: trains[training].share, at[1]: serves[generation].share}
        return mine.candidate(tuple(both.get(i, share) for i, share in enumerate(chosen)), "Serial")

    def switch(training: RankGrid, generation: RankGrid) -> float:
        phases = search.costs.estimate(candidate(training, generation)).phases
        return phases["transfer"] + phases["swap"]

    found = similar(list(trains), list(serves), lambda x: trains[x].seconds, lambda x: serves[x].seconds, switch)
    return candidate(found.training, found.generation)


class _EveryWay:
    """Also looks at ways to save memory where it is plenty."""

    costs: GPUCosts

    def ways(self, task: Task, shares: Sequence[Share]) -> list[Option]:
        return [self.costs.option(task, share) for share in shares]


class _Everything(_EveryWay, Ranker):
    pass


class _FreeEverything(_EveryWay, FreeRanker):
    pass


def exhaustive(limits: Limits, costs: GPUCosts) -> Result:
    """Every structure, every combination of layouts, every schedule and threshold: for small cases, and to test by."""
    search = search_of(limits, costs, Effort(estimates=10**12))
    search.ranker = _FreeEverything(limits, costs) if isinstance(limits, FreeLimits) else _Everything(limits, costs)
    for structure in search.structures(every_size):
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
