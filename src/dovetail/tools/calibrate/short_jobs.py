"""Makes short jobs with a job's models and data, runs them in turn, and fits the machine's costs to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob, RLHFJobSpec, Role, Stage
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.errors import RunError
from dovetail.protocol.files.machine_profile import Machine
from dovetail.protocol.plan import Plan
from dovetail.tools.calibrate.fit import FitError, MeasuredIteration, fit
from dovetail.tools.calibrate.observe import observe

# The iterations of a job that are measured, after WARMUP or SEARCHES iterations that are not.
ITERATIONS = 4
WARMUP = 2
# With pipeline stages a search of schedules runs beside the second, third and fifth iteration.
SEARCHES = 5
# A checkpoint would delete the batches of iterations before they are read.
NEVER = 1_000_000


@dataclass(frozen=True)
class JobShape:
    """The sizes of an iteration, and its layout. `pp`: pipeline stages. There are trainers / pp data-parallel copies of
    the pipeline."""

    batch: int
    mini_batch: int
    micro_batch: int
    max_tokens: int
    epochs: int = 1
    trainers: int = 1
    rollouts: int = 1
    pp: int = 1
    placement: Literal["Flattening", "Interleaving", "Separation"] = "Separation"
    schedule: str = "Auto"
    fusion: str | float = "Off"

    @property
    def groups(self) -> list[dict[str, Any]]:
        if self.placement == "Flattening":
            return [{"name": "pods", "roles": ["trainer", "rollout"], "replicas": self.trainers}]
        return [
            {"name": "trainers", "roles": ["trainer"], "replicas": self.trainers},
            {"name": "rollouts", "roles": ["rollout"], "replicas": self.rollouts},
        ]


def variant(job: RLHFJob, shape: JobShape, iterations: int = ITERATIONS) -> RLHFJob:
    """The job with another shape. It trains the models as they are given: it has no SFT, and only one step of the
    reward model if it trains one. `iterations`: the number of iterations that are measured."""
    document = job.model_dump(mode="json", by_alias=True)
    spec = document["spec"]
    spec["stages"] = [s for s in spec["stages"] if s != Stage.SFT.value]
    pp = shape.pp
    layout = {"pp": pp, "tp": 1, "dp": shape.trainers // pp}
    spec["ppo"] |= {
        "iterations": iterations + (SEARCHES if pp > 1 else WARMUP),
        "globalBatchSize": shape.batch,
        "miniBatchSize": shape.mini_batch,
        "microBatchSize": shape.micro_batch,
        "epochs": shape.epochs,
        "criticWarmupIterations": 0,
        # The phases of an iteration must not overlap.
        "lag": 0,
    }
    spec["generation"]["maxTokens"] = shape.max_tokens
    if Stage.REWARD.value in spec["stages"]:
        del spec["reward"]["epochs"]
        spec["reward"] |= {"steps": 1, "batchSize": 2 * shape.trainers, "microBatchSize": 1}
    arguments = [a for g in job.spec.groups if Role.ROLLOUT in g.roles for a in g.vllm_args]
    groups = [dict(group) for group in shape.groups]
    for group in groups:
        if "rollout" in group["roles"]:
            group["vllmArgs"] = arguments
    spec["groups"] = groups
    spec["plan"] |= {
        "placement": shape.placement,
        "parallelism": {"actor": layout},
        "interStageFusion": shape.fusion,
        "intraStageFusion": shape.schedule,
    }
    spec["checkpoint"]["everySteps"] = NEVER
    spec["activeDeadlineSeconds"] = None
    return RLHFJob.model_validate(document)


def warmup(spec: RLHFJobSpec) -> int:
    """The number of iterations at the beginning of a `variant` that do not count."""
    layouts = spec.plan.parallelism
    return SEARCHES if layouts != "Auto" and layouts.actor.pp > 1 else WARMUP


def calibration_jobs(job: RLHFJob, layers: int) -> list[RLHFJob]:
    """The short jobs. Two have one rollout and one rank, in two sizes. One has two rollouts and two ranks, which share
    the machine. One has scorers with different models, and pipeline stages if the models have several `layers`."""
    ppo, longest = job.spec.ppo, job.spec.generation.max_tokens
    group = ppo.samples_per_prompt
    batch = ppo.global_batch_size
    mini = ppo.mini_batch_size
    micro = ppo.micro_batch_size
    small = max(1, micro // 4)
    # Two ranks must share a mini-batch evenly.
    shared = micro if mini % (2 * micro) == 0 else small if mini % (2 * small) == 0 else 1
    half = batch // 2 if (batch // 2) % mini == 0 and (batch // 2) % group == 0 else batch
    shapes = [
        JobShape(batch, mini, micro, longest),
        JobShape(half, mini, small, max(2, longest // 2), epochs=2),
        JobShape(batch, mini, shared, longest, trainers=2, rollouts=2),
        JobShape(
            half,
            mini,
            shared,
            longest,
            trainers=2,
            rollouts=2,
            pp=2 if layers > 1 else 1,
            placement="Interleaving",
        ),
    ]
    if mini % 2:
        shapes = shapes[:2]
    return [variant(job, shape) for shape in shapes]


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
