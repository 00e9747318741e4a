"""Training schedules: action lists and their checker; fused pipelines, their search and evaluation in submodules."""

from dovetail.pipelines.actions import ScheduleError, one_f_one_b, serial_1f1b, validate_schedule

__all__ = ["ScheduleError", "one_f_one_b", "serial_1f1b", "validate_schedule"]
