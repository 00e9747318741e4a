"""The answers of the status API."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from dovetail.manifest.status import Condition, RLHFJobStatus


class Answer(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True)


class Job(Answer):
    """One line of the list."""

    namespace: str
    name: str
    uid: str
    created: datetime
    state: str = Field(description="Completed, Failed, Suspended, Running, Scheduled, Planned or Pending.")
    stage: str | None = None
    iteration: int | None = Field(default=None, description="Finished PPO iterations, or steps of the stage.")
    iterations: int | None = Field(default=None, description="Iterations or steps that the stage has in all.")
    reward: float | None = None
    kl: float | None = Field(default=None, description="Nats per sample.")
    samples_per_second: float | None = None


class JobList(Answer):
    items: list[Job]
    continue_token: str | None = Field(
        default=None, serialization_alias="continue", description="Pass as `continue` for the rest."
    )


class KubeEvent(Answer):
    """A Kubernetes Event about the job."""

    time: datetime | None
    type: str
    reason: str
    message: str
    count: int


class Live(Answer):
    """The last status that the coordinator reported."""

    reachable: bool = Field(description="Whether the coordinator answered just now.")
    message: str = Field(default="", description="Why not, if not.")
    status: dict[str, Any] | None = Field(
        default=None,
        description="Its GET /v1/status: state, stage, step, phase, samples done, and each instance's health.",
    )


class JobDetail(Job):
    """Everything about one job."""

    status: RLHFJobStatus = Field(description="The RLHFJob's status, as the operator wrote it.")
    conditions: list[Condition] = Field(description="status.conditions, the newest change first.")
    live: Live
    events: list[KubeEvent] | None = Field(
        default=None, description="The newest 20, newest first; null if you may not list events."
    )
    links: dict[str, str] = Field(description="Paths of iterations, plan, events and logs.")


class Iteration(Answer):
    """A finished PPO iteration, a step of SFT or reward training, or an evaluation."""

    stage: str
    step: int
    time: datetime | None = Field(default=None, description="When it was finished.")
    metrics: dict[str, float] = Field(
        description="loss, reward, kl, samples_per_second, seconds_generation and the like, by stage."
    )


class IterationList(Answer):
    items: list[Iteration] = Field(description="In order; of a step that was replayed, the last time.")
    next: int = Field(description="Pass as `after` to get only newer ones.")
    complete: bool = Field(description="False if the coordinator could not be asked: there may be more.")


class PodLog(Answer):
    """The place of one pod's log."""

    pod: str
    group: str | None
    phase: str
    node: str | None
    log: str = Field(description="Path of the log here.")
    kubectl: str = Field(description="The command that shows it, too.")


class PodLogList(Answer):
    items: list[PodLog]


class Problem(Answer):
    """Any error."""

    detail: str = Field(description="One sentence.")
