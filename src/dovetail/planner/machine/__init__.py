"""PPO iterations on one machine whose cores all processes share, by what `dovetail profile --iterations` measured."""

from dovetail.planner.machine.fit import FitError, Observed, fit
from dovetail.planner.machine.iteration import seconds
from dovetail.planner.machine.work import Work

__all__ = ["FitError", "Observed", "Work", "fit", "seconds"]
