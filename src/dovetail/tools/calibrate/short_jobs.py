"""Makes short jobs with a job's models and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dovetail.manifest.types import RLHFJob, RLHFJobSpec, Role, Stage

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


def calibration_jobs(job: RLHFJob, layers: int, iterations: int = ITERATIONS) -> list[RLHFJob]:
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
    return [variant(job, shape, iterations) for shape in shapes]
