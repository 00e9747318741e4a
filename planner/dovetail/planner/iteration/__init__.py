"""One iteration of PPO on a candidate placement: estimated in closed form, or played event by event."""

from dovetail.planner.iteration.estimate import PHASES, Estimate, estimate, task_seconds
from dovetail.planner.iteration.memory import GPUMemory, task_memory
from dovetail.planner.iteration.simulate import Simulated, simulate, simulate_many
from dovetail.planner.iteration.system import DOVETAIL, System

__all__ = [
    "DOVETAIL",
    "PHASES",
    "Estimate",
    "GPUMemory",
    "Simulated",
    "System",
    "estimate",
    "simulate",
    "simulate_many",
    "task_memory",
    "task_seconds",
]
