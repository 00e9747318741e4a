"""Runs the short jobs one after the other, and fits the machine's costs to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob, Stage
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.errors import RunError
from dovetail.protocol.files.machine_profile import Machine
from dovetail.protocol.plan import Plan
from dovetail.tools.calibrate.fit import FitError, MeasuredIteration, fit
from dovetail.tools.calibrate.observe import observe
from dovetail.tools.calibrate.short_jobs import calibration_jobs, warmup

DEADLINE_SECONDS = 1800.0


def measure_machine(job: RLHFJob, layers: int, folder: Path, tell: Callable[[str], None]) -> Machine:
    """Run the short jobs and fit the machine's costs to them. `job`: the largest iterations have its sizes. `layers`:
    the layers of its models. `folder`: the place of the run directories. Raises RunError."""
    seen: list[MeasuredIteration] = []
    jobs = calibration_jobs(job, layers)
    for number, each in enumerate(jobs):
        tell(f"running job {number + 1} of {len(jobs)}")
        plan = run_one(each, folder / str(number))
        seen += observe(each.spec, plan, folder / str(number), warmup(each.spec))
    try:
        return fit(seen, cores(), None if Stage.SFT in job.spec.stages else end_rate(seen))
    except FitError as error:
        raise RunError(f"this machine could not be measured: {error}.") from error


def run_one(job: RLHFJob, run_dir: Path) -> Plan:
    """Run a job. It replaces an earlier run in the folder. Raises RunError if the job fails."""
    told: list[str] = []
    plan = make_plan(job.spec)
    job = job.model_copy(
        update={"spec": job.spec.model_copy(update={"active_deadline_seconds": int(DEADLINE_SECONDS)})}
    )
    with Launcher(job, plan, run_dir, "overwrite", tell=told.append) as launcher:
        outcome = launcher.run()
    if not outcome.succeeded:
        raise RunError("a job that measures this machine failed: " + "\n".join([str(outcome.reason), *told[-5:]]))
    return plan


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def end_rate(seen: list[MeasuredIteration]) -> float:
    """The probability that a token ends its response. It is the number of responses shorter than the longest one of
    their iteration, divided by the number of tokens."""
    ended = tokens = 0
    for each in seen:
        lengths = np.asarray(each.work.responses)
        ended += int((lengths < lengths.max()).sum())
        tokens += int(lengths.sum())
    return max(ended, 1) / tokens
