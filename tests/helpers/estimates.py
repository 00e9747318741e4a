"""An iteration of a candidate by our cost model of GPUs, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.cli.simulated_iteration import Simulated
from dovetail.cli.simulated_iteration import simulate as played
from dovetail.gpus.inventory import Inventory
from dovetail.planner.candidate import Candidate
from dovetail.planner.seconds import Estimate, GPUCosts
from dovetail.planner.workload import Workload


def estimate(candidate: Candidate, work: Workload, inventory: Inventory) -> Estimate:
    return GPUCosts(work, inventory).estimate(candidate)


def simulate(
    candidate: Candidate, work: Workload, inventory: Inventory, prompts: Sequence[int], lengths: Sequence[int]
) -> Simulated:
    return played(candidate, GPUCosts(work, inventory), prompts, lengths)
