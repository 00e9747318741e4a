"""Our own plan for a paper's setting: the search, or a paper's strategy, on our own software."""

from __future__ import annotations

from functools import cache

from dovetail.planner.inventory import Inventory
from dovetail.planner.placements import effort
from dovetail.planner.seconds import GPUCosts
from dovetail.planner.workload import Workload
from papers.free_placements import FreeLimits
from papers.strategies import Strategy, choose

SEARCH = True
STRATEGY: Strategy = "search"


@cache
def planned(work: Workload, inventory: Inventory) -> float | None:
    """Seconds of an iteration; None: nothing fits."""
    if not SEARCH:
        return None
    found = choose(STRATEGY, FreeLimits(), GPUCosts(work, inventory), effort(inventory)).best
    return None if found is None else found.seconds
