"""The planner's predictions for a plan: times, memory, and the plans that it did not choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from dovetail.manifest.base import Model
from dovetail.manifest.checks.pod_templates import memory_limit
from dovetail.manifest.types import Stage

Seconds = Annotated[float, Field(ge=0.0)]
GIB = 2**30
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class PredictedTask(Model):
    """A task of an iteration on the GPUs of one group."""

    task: str
    group: str
    first: int = Field(ge=0, description="First of its GPUs in the group.")
    gpus: int = Field(ge=1)
    pp: int = Field(ge=1)
    tp: int = Field(ge=1)
    dp: int = Field(ge=1)
    micro_batch: int = Field(ge=1, description="Sequences of one forward pass. It means nothing for generation.")
    seconds: Seconds = Field(description="The seconds in an iteration, if nothing else ran on these GPUs.")
    details: list[str] = Field(default_factory=list, description="What the task does to need less memory.")


class PredictedStage(Model):
    """SFT, training of the reward model, or DPO."""

    stage: Stage
    steps: int | None = Field(
        default=None, ge=1, description="It is null if they follow from epochs and the number of records."
    )
    step_seconds: Seconds = Field(
        description="Of a step if every sequence has data.maxTokens tokens; shorter ones take less. With DPO the "
        "reference's log-probabilities are in it. Evaluations, checkpoints and the export are not."
    )


class PredictedMemory(Model):
    """The memory of a group's GPUs that have the same tasks."""

    group: str
    first: int = Field(ge=0)
    gpus: int = Field(ge=1)
    parts: dict[str, float] = Field(description="Bytes of each GPU by task and part, at the peak of an iteration.")
    host: dict[str, float] = Field(default_factory=dict, description="Bytes of host memory for each GPU.")
    capacity: float = Field(description="Bytes of a GPU.")


class PodMemory(Model):
    """The memory of a CPU group's pods that run the same processes."""

    group: str
    first: int = Field(ge=0)
    pods: int = Field(ge=1)
    parts: dict[str, float] = Field(description="Bytes by task and part, at the peak of a PPO iteration.")

    @property
    def used(self) -> float:
        """The memory that is used, in bytes."""
        return sum(self.parts.values())


def too_small(found: Sequence[PodMemory], templates: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each group whose pods may use less memory than they need. `templates` has each group's
    podTemplate, with what the administrator adds to it."""
    for group, pods in groupby(found, key=lambda each: each.group):
        worst, limit = max(pods, key=lambda each: each.used), memory_limit(templates[group])
        if limit is None or worst.used <= limit.size:
            continue
        largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3g}" for name, size in largest)
        yield (
            f"a pod of group {group} is expected to need {worst.used / GIB:.3g} GiB of memory (most: {parts}), but "
            f"{limit.name} of its podTemplates is {limit.size / GIB:.3g} GiB; raise it"
        )


# The coordinator's names of those planner phases that it calls by another name.
MEASURED_NAMES = {"transfer": "weights"}


class Alternative(Model):
    """The best placement of a kind that was not chosen."""

    placement: str
    note: str = ""
    seconds: Seconds | None = Field(
        default=None, description="The seconds of an iteration, or null if it does not fit."
    )
    problem: str | None = Field(default=None, description="Why it does not fit, with the number that failed.")


class PredictedLag(Model):
    """A mean iteration with a value of spec.ppo.lag."""

    lag: int = Field(ge=0)
    iteration_seconds: Seconds | None = Field(default=None, description="It is null if the job cannot have this lag.")
    trainer_idle: Share | None = Field(
        default=None, description="Share of the time in which the trainers do not train."
    )
    rollout_idle: Share | None = Field(
        default=None,
        description="Share of the time in which a rollout neither takes weights nor generates nor scores, mean over "
        "the rollouts.",
    )
    problem: str | None = Field(default=None, description="Why the job cannot have this lag.")


class Prediction(Model):
    """One PPO iteration of a plan."""

    # Those of earlier releases have more fields.
    model_config = ConfigDict(extra="ignore")

    placement: Literal["Flattening", "Interleaving", "Separation"]
    note: str = ""
    schedule: str = Field(description="How actor and critic training share their GPUs.")
    migration: float | None = Field(description="Share of the samples left at which generation's tail gathers.")
    iteration_seconds: Seconds
    synchronous_seconds: Seconds = Field(
        default=0.0,
        description="What the iteration would take if its phases followed each other, as they do without a lag; 0 in "
        "plans of earlier releases.",
    )
    phases: dict[str, Seconds] = Field(
        description="What is hidden behind another phase counts nothing. Without a lag they follow each other. With "
        "a lag those of rollouts and of trainers overlap, and `waiting` is how long the trainers have no samples."
    )
    lag: int = Field(default=0, ge=0, description="The lag (spec.ppo.lag) that all this is predicted for.")
    lags: list[PredictedLag] = Field(default_factory=list, description="What the job would take with other lags.")
    best_lag: int = Field(default=0, ge=0, description="The lag that the planner would take.")
    best_lag_reason: str = Field(default="", description="Why, as one sentence without a full stop.")
    samples_per_second: float
    samples_per_dollar: float | None = Field(
        default=None, description="Work that is lost when GPUs come and go is counted. Null where a price is missing."
    )
    lost_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="The share of the price that pays for starts and deaths of GPUs that come and go.",
    )
    hardware: Literal["measured", "data sheets"]
    tasks: list[PredictedTask]
    memory: list[PredictedMemory]
    alternatives: list[Alternative] = Field(default_factory=list, description="Fastest first, then those that fail.")
    examined: int = Field(default=0, ge=0, description="Iterations that were estimated.")

    def lasting(self, seconds: float, **changes: Any) -> Prediction:
        """The prediction for the same work if an iteration takes so many seconds (above 0). Samples per second and per
        dollar follow from the seconds. The other arguments change further fields."""
        faster = self.iteration_seconds / seconds
        price = None if self.samples_per_dollar is None else faster * self.samples_per_dollar
        speed = {"samples_per_second": faster * self.samples_per_second, "samples_per_dollar": price}
        return self.model_copy(update={"iteration_seconds": seconds, **speed, **changes})
