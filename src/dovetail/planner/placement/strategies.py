"""Ways to choose a placement, by name: ours, and those of the papers that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from dovetail.planner.layouts import similar
from dovetail.planner.placement.candidate import Candidate, Placement, Share
from dovetail.planner.placement.costs import Estimator, Option
from dovetail.planner.placement.inventory import Inventory
from dovetail.planner.placement.limits import Limits
from dovetail.planner.placement.ranking import Ranking
from dovetail.planner.placement.search import Effort, Result, Search, exhaustive
from dovetail.planner.placement.structures import ALONE, Slots, Structure, structures
from dovetail.planner.placement.workload import Workload
from dovetail.planner.switching import Layout

Strategy = Literal["search", "prior", "grid", "similar", "exhaustive"]
STRATEGIES: tuple[Strategy, ...] = ("search", "prior", "grid", "similar", "exhaustive")
# APP section V-C: 30 to 50 % of the devices to the predicting actor and to the training models each.
PRIOR = (0.3, 0.5)
# Placement ratios of APP's grid.
GRID = (0.25, 0.5, 0.75, 1.0)


def choose(
    strategy: Strategy, inventory: Inventory, workload: Workload, limits: Limits, costs: Estimator, effort: Effort
) -> Result:
    """search: ours. prior, grid: APP's two modes, over placements that its rules or its grid of ratios allow. similar:
    everything on all GPUs, generation's layout by PUZZLE's descent from the best training layout. exhaustive: all."""
    if strategy == "exhaustive":
        return exhaustive(inventory, workload, limits, costs)
    if strategy == "similar":
        return _similar(inventory, workload, limits, costs, effort)
    accepted: dict[str, Callable[[Structure], bool]] = {
        "search": lambda structure: True,
        "prior": lambda structure: _prior(structure, inventory),
        "grid": lambda structure: _on_grid(structure, inventory),
    }
    return Search(inventory, workload, limits, costs, effort, accept=accepted[strategy]).run()


def _count(slots: Slots) -> int:
    return sum(slot.count for slot in slots)


def _prior(structure: Structure, inventory: Inventory) -> bool:
    """Separation with the shares of PRIOR; the rest infers, if there is one."""
    training = set(structure.actor_training) | set(structure.critic_training)
    trains, generates = _count(tuple(training)), _count(structure.generation)
    low, high = (share * inventory.gpus for share in PRIOR)
    separate = structure.placement is Placement.SEPARATION or ALONE in structure.note
    return separate and low <= trains <= high and low <= generates <= high


def _on_grid(structure: Structure, inventory: Inventory) -> bool:
    tasks = (structure.generation, structure.actor_training, structure.critic_training, structure.reference)
    ratios = (_count(slots) / inventory.gpus for slots in (*tasks, structure.reward, structure.critic) if slots)
    return all(any(abs(ratio - point) < 1e-9 for point in GRID) for ratio in ratios)


def _similar(inventory: Inventory, workload: Workload, limits: Limits, costs: Estimator, effort: Effort) -> Result:
    flat = replace(limits, placements=(Placement.FLATTENING,))
    search = Search(inventory, workload, flat, costs, effort)
    for structure in structures(inventory, workload, flat):
        ranking = search.ranker.rank(structure, width=10**9)
        # Layouts are of the same ranks; pools that only generate have none in common with training.
        if isinstance(ranking, Ranking) and structure.generation == structure.actor_training:
            _descend(search, ranking)
    return search.result


def _descend(search: Search, ranking: Ranking) -> None:
    """Once with each task's fastest ways to hold a layout, once with those that need least memory."""
    places = [task for task, _ in ranking.places]
    actor, served = places.index("actor_training"), places.index("generation")
    orders: tuple[Callable[[Option], float], ...] = (lambda option: option.seconds, lambda option: option.need)
    for order in orders:
        ordered = [sorted(ranked, key=order) for ranked in ranking.layouts]
        trains = {option.share.layout: option for option in reversed(ordered[actor])}
        serves = {option.share.layout: option for option in reversed(ordered[served])}
        chosen = [ranked[0].share for ranked in ordered]
        found = _puzzle(search, ranking, chosen, (actor, served), (trains, serves))
        search.estimated(found, ranking.structure.note)


def _puzzle(
    search: Search,
    ranking: Ranking,
    chosen: list[Share],
    at: tuple[int, int],
    layouts: tuple[dict[Layout, Option], dict[Layout, Option]],
) -> Candidate:
    trains, serves = layouts

    def candidate(training: Layout, generation: Layout) -> Candidate:
        both = {at[0]: trains[training].share, at[1]: serves[generation].share}
        return search.candidate(ranking, [both.get(i, share) for i, share in enumerate(chosen)], "Serial")

    def switch(training: Layout, generation: Layout) -> float:
        phases = search.costs.estimate(candidate(training, generation)).phases
        return phases["transfer"] + phases["swap"]

    found = similar(list(trains), list(serves), lambda x: trains[x].seconds, lambda x: serves[x].seconds, switch)
    return candidate(found.training, found.generation)
