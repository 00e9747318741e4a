"""Our own plan for a paper's setting: the search, with all that the planner knows of, on our own software."""

from __future__ import annotations

from functools import cache

from dovetail.planner.placement import Inventory, Workload
from dovetail.planner.placement.costs import Costs
from dovetail.planner.placement.limits import Limits
from dovetail.planner.placement.recommend import effort
from dovetail.planner.placement.search import Search

SEARCH = True


@cache
def planned(work: Workload, inventory: Inventory) -> float | None:
    """Seconds of an iteration; None: nothing fits."""
    if not SEARCH:
        return None
    found = Search(inventory, work, Limits(), Costs(work, inventory), effort(inventory)).run().best
    return None if found is None else found.seconds
