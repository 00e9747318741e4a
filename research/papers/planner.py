"""Our own plan for a paper's setting."""

from __future__ import annotations

from functools import cache

from dovetail.gpus.inventory import Inventory
from dovetail.planner.placements import effort
from dovetail.planner.seconds import GPUCosts
from dovetail.planner.workload import Workload
from papers.free_placements import FreeLimits, FreeSearch

SEARCH = True


@cache
def planned(work: Workload, inventory: Inventory) -> float | None:
    """Seconds of an iteration; None: nothing fits."""
    if not SEARCH:
        return None
    found = FreeSearch(FreeLimits(), GPUCosts(work, inventory), effort(inventory)).run().best
    return None if found is None else found.seconds
