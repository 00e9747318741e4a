"""The status of an RLHFJob. It has what a controller observed, and never what a user asked for."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from dovetail.manifest.base import Model

ConditionType = Literal[
    "Planned", "Suspended", "Scheduled", "Running", "Degraded", "Disrupted", "Healthy", "Completed", "Failed"
]


class Observed(Model):
    """Base of status objects: fields of newer versions are ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class Condition(Observed):
    """A metav1.Condition: one thing that is true, false or unknown about the job."""

    type: ConditionType = Field(description="What the condition is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="metadata.generation of the manifest that was judged."
    )
    last_transition_time: datetime = Field(description="When `status` last changed.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="One word for programs.",
    )
    message: str = Field(
        max_length=32768, description="The root cause for people: the pod, its exit code, its last log line."
    )


class GroupStatus(Observed):
    """Pods of one group."""

    name: str = Field(max_length=63, description="The group's name.")
    desired: int = Field(default=0, ge=0, description="Pods that should run.")
    ready: int = Field(
        default=0, ge=0, description="Pods that work: trainer ranks joined, rollouts with current weights."
    )


class PlanStatus(Observed):
    """The plan in short; the whole is in a ConfigMap."""

    placement: str | None = Field(default=None, max_length=63, description="Placement strategy chosen.")
    actor: str | None = Field(
        default=None, max_length=63, description="Layout of the actor's training, as pp2 tp1 dp4."
    )
    critic: str | None = Field(default=None, max_length=63, description="Layout of the critic's training.")
    schedule: str | None = Field(default=None, max_length=63, description="Family of the training schedule.")
    rollouts: int | None = Field(
        default=None, ge=0, description="Number of rollouts that the plan expects on the present nodes."
    )
    hash: str | None = Field(default=None, max_length=64, description="SHA-256 of the plan document.")


class CheckpointStatus(Observed):
    """The last checkpoint that was written completely."""

    stage: str = Field(max_length=16, description="Stage of the checkpoint.")
    step: int = Field(ge=0, description="Its last applied step or iteration.")
    path: str = Field(max_length=4096, description="Folder on the job's volume.")
    time: datetime | None = Field(default=None, description="When it was complete.")


class EvaluationStatus(Observed):
    """The last evaluation of the policy, and the best one."""

    iteration: int = Field(ge=0, description="Iteration after which the weights were evaluated; 0: before PPO.")
    metric: str = Field(max_length=256, description="The first metric of spec.evaluation.metrics.")
    value: float = Field(description="Its mean over the prompts.")
    best_iteration: int | None = Field(
        default=None, ge=0, description="Iteration after which it was the highest, with evaluations during PPO."
    )
    best_value: float | None = Field(default=None, description="Its mean there.")


class ModelStatus(Observed):
    """A model that was fetched from a hub."""

    name: str = Field(max_length=63, description="actor, critic, reward, reference or tokenizer.")
    repository: str = Field(max_length=1024, description="Repository on the hub.")
    commit: str = Field(max_length=64, description="Its commit. A job that is resumed uses the same.")


class ArtifactStatus(Observed):
    """A trained model, as a Hugging Face folder."""

    name: str = Field(max_length=63, description="sft, reward, actor, actor-best, actor-ema or critic.")
    claim: str = Field(max_length=253, description="The claim with the job's files.")
    path: str = Field(max_length=4096, description="The model's folder on this claim.")
    copy_: str | None = Field(
        default=None,
        alias="copy",
        max_length=4096,
        description="Where spec.output had it copied: s3://bucket/prefix/name, claim/path/name, or a folder.",
    )


class RLHFJobStatus(Observed):
    """The observed state of the job."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="metadata.generation that this status is about."
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="One entry for each type; see each condition's reason and message.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    state: str | None = Field(
        default=None,
        max_length=16,
        description="Completed, Failed, Suspended, Running, Scheduled, Planned or Pending: the first that holds.",
    )
    stage: str | None = Field(default=None, max_length=16, description="Stage under way: sft, reward or ppo.")
    iteration: int | None = Field(
        default=None, ge=0, description="Finished PPO iterations, or steps of the stage under way."
    )
    iterations: int | None = Field(default=None, ge=0, description="Iterations or steps that the stage has in all.")
    reward: float | None = Field(default=None, description="Mean score of the last iteration's samples.")
    kl: float | None = Field(default=None, description="Mean KL from the reference, nats per sample.")
    samples_per_second: float | None = Field(
        default=None, ge=0, description="Samples per second of the last iteration."
    )
    weight_version: int | None = Field(
        default=None, ge=0, description="Version of the newest weights that were published."
    )
    evaluation: EvaluationStatus | None = Field(default=None, description="Newest and best evaluation.")
    groups: list[GroupStatus] = Field(
        default_factory=list,
        max_length=32,
        description="Ready counts by group.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    last_checkpoint: CheckpointStatus | None = Field(default=None, description="Newest checkpoint.")
    models: list[ModelStatus] = Field(
        default_factory=list,
        max_length=8,
        description="Models that were fetched from a hub.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    artifacts: list[ArtifactStatus] = Field(
        default_factory=list,
        max_length=16,
        description="The trained models of a completed job.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    plan: PlanStatus | None = Field(default=None, description="The plan in short.")
    predicted_iteration_seconds: float | None = Field(
        default=None, ge=0, description="The planner's prediction, seconds."
    )
    measured_iteration_seconds: float | None = Field(default=None, ge=0, description="The last iteration, seconds.")
    retry: int | None = Field(default=None, ge=0, description="spec.retry as it was last seen before the job failed.")
    start_time: datetime | None = Field(default=None, description="When the first process started.")
    completion_time: datetime | None = Field(default=None, description="When the job completed or failed.")
