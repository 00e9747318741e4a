"""One iteration of PPO on a candidate placement: estimated in closed form, or played event by event."""

from dovetail.planner.iteration.estimate import PHASES, Estimate, estimate
from dovetail.planner.iteration.memory import GPUMemory
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
]
