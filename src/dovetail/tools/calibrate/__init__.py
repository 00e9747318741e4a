"""Measures the costs of a job's models on this machine. It runs whole iterations of a few sizes."""

from dovetail.tools.calibrate.observe import observe, run_lengths
from dovetail.tools.calibrate.short_jobs import JobShape, calibration_jobs, measure_machine, variant, warmup

__all__ = ["JobShape", "calibration_jobs", "measure_machine", "observe", "run_lengths", "variant", "warmup"]
