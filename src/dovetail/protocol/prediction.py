"""What the planner expects of a plan: times, memory, and the plans that it decided against."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dovetail.manifest.base import Model

Seconds = Annotated[float, Field(ge=0.0)]


class PredictedTask(Model):
    """A task of an iteration on the GPUs of one group."""

    task: str
    group: str
    first: int = Field(ge=0, description="First of its GPUs in the group.")
    gpus: int = Field(ge=1)
    pp: int = Field(ge=1)
    tp: int = Field(ge=1)
    dp: int = Field(ge=1)
    micro_batch: int = Field(ge=1, description="Sequences of one forward pass; of no meaning for generation.")
    seconds: Seconds = Field(description="In an iteration, if nothing else ran on these GPUs.")
    details: list[str] = Field(default_factory=list, description="What it does to need less memory.")


class PredictedMemory(Model):
    """GPUs of a group with the same tasks."""

    group: str
    first: int = Field(ge=0)
    gpus: int = Field(ge=1)
    parts: dict[str, float] = Field(description="Bytes of each GPU by task and part, at the peak of an iteration.")
    host: dict[str, float] = Field(default_factory=dict, description="Bytes of host memory for each GPU.")
    capacity: float = Field(description="Bytes of a GPU.")


class PodMemory(Model):
    """Pods of a group on CPUs that run the same processes."""

    group: str
    first: int = Field(ge=0)
    pods: int = Field(ge=1)
    parts: dict[str, float] = Field(description="Bytes by task and part, at the peak of a PPO iteration.")
    limit: float | None = Field(default=None, description="Bytes that the group's podTemplate says; null: nothing.")
    field: str = Field(default="", description="Where it says so.")

    @property
    def used(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


class Alternative(Model):
    """The best of a kind of placement that was not chosen."""

    placement: str
    note: str = ""
    seconds: Seconds | None = Field(default=None, description="Of an iteration; null: it does not fit.")
    problem: str | None = Field(default=None, description="Why it does not fit, with the number that failed.")


class Prediction(Model):
    """One PPO iteration of a plan."""

    placement: Literal["Flattening", "Interleaving", "Separation"]
    note: str = ""
    schedule: str = Field(description="How actor and critic training share their GPUs.")
    migration: float | None = Field(description="Share of the samples left at which generation's tail gathers.")
    iteration_seconds: Seconds
    phases: dict[str, Seconds] = Field(description="One after the other; what is hidden behind another counts nothing.")
    samples_per_second: float
    samples_per_dollar: float | None = Field(default=None, description="Null where a price is missing.")
    hardware: Literal["measured", "data sheets"]
    tasks: list[PredictedTask]
    memory: list[PredictedMemory]
    alternatives: list[Alternative] = Field(default_factory=list, description="Fastest first, then those that fail.")
    examined: int = Field(default=0, ge=0, description="Iterations that were estimated.")
