"""Which task of an iteration runs on which GPUs (APP section V): the inventory, the candidates and the search."""

from dovetail.planner.placement.candidate import INFERENCE, TASKS, TRAINING, Candidate, Placement, Schedule, Share, Task
from dovetail.planner.placement.inventory import Inventory, InventoryError, Pool
from dovetail.planner.placement.workload import Lengths, Workload

__all__ = [
    "INFERENCE",
    "TASKS",
    "TRAINING",
    "Candidate",
    "Inventory",
    "InventoryError",
    "Lengths",
    "Placement",
    "Pool",
    "Schedule",
    "Share",
    "Task",
    "Workload",
]
