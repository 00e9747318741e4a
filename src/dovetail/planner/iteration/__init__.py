"""One iteration of PPO on a candidate placement: estimated in closed form, or played event by event (`simulate`, which
is not imported here: it compiles the schedules' kernels)."""

from dovetail.planner.iteration.estimate import PHASES, Estimate, estimate
from dovetail.planner.iteration.memory import GPUMemory
from dovetail.planner.iteration.system import DOVETAIL, System

__all__ = ["DOVETAIL", "PHASES", "Estimate", "GPUMemory", "System", "estimate"]
