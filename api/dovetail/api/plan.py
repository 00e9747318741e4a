"""The plan: what the planner decides and every process of a job reads, as plan.json.

The rank convention lives here and nowhere else: see `coordinates`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from dovetail.api.types import Group, Model, Parallelism, RLHFJobSpec, Role, Stage

PLAN_VERSION = 1

Task = Literal[
    "sft", "reward_training", "actor_training", "critic_training", "generation", "reference", "reward", "critic"
]


class Coordinates(NamedTuple):
    """A rank's place in one model's layout, each from 0."""

    pp: int
    dp: int
    tp: int


def coordinates(rank: int, layout: Parallelism) -> Coordinates:
    """Place of trainer rank `rank` in `layout`: rank = (pp * layout.dp + dp) * layout.tp + tp.

    Ranks of one tensor-parallel group are neighbours (they talk most), pipeline stages are furthest apart. Raises
    ValueError for a rank outside the layout."""
    if not 0 <= rank < world_size(layout):
        raise ValueError(f"rank {rank} is outside a layout of {world_size(layout)} ranks")
    rest, tp = divmod(rank, layout.tp)
    pp, dp = divmod(rest, layout.dp)
    return Coordinates(pp, dp, tp)


def rank_at(place: Coordinates, layout: Parallelism) -> int:
    """Inverse of `coordinates`."""
    return (place.pp * layout.dp + place.dp) * layout.tp + place.tp


def world_size(layout: Parallelism) -> int:
    """Ranks that the layout occupies."""
    return layout.pp * layout.dp * layout.tp


def pod_count(group: Group) -> int:
    """Pods that a group starts with: replicas, else minReplicas, else 1."""
    return group.replicas or group.min_replicas or 1


def trainer_ranks(group: Group) -> int:
    """Trainer ranks of a group: one a GPU, one a pod on CPUs; 0 without the trainer role."""
    return pod_count(group) * max(1, group.gpu.per_pod) if Role.TRAINER in group.roles else 0


def trainer_world(spec: RLHFJobSpec) -> int:
    """Trainer ranks of the whole job."""
    return sum(trainer_ranks(group) for group in spec.groups)


def trained_models(spec: RLHFJobSpec) -> list[str]:
    """Models that the job's stages train, in the order actor, critic, reward."""
    found = []
    if Stage.SFT in spec.stages or Stage.PPO in spec.stages:
        found.append("actor")
    if Stage.PPO in spec.stages and spec.ppo.advantage == "gae":
        found.append("critic")
    if Stage.REWARD in spec.stages:
        found.append("reward")
    return found


class TaskPlacement(Model):
    """Where a task runs."""

    task: Task
    groups: list[str] = Field(description="Names of the pod groups; trainers of several groups form one world.")


class TrainerRank(Model):
    """One trainer process."""

    name: str = Field(description="trainer-<rank>")
    rank: int
    group: str


class Rollout(Model):
    """One vLLM server and the scorer beside it."""

    name: str = Field(description="<group>-<index>")
    group: str


class Batching(Model):
    """How one model's batch is cut in one stage. Sequences; in reward training, pairs."""

    stage: Stage
    model: str
    mini_batch_size: int = Field(description="Sequences per optimizer step, all data-parallel ranks together.")
    micro_batch_size: int = Field(description="Sequences per forward pass of one rank.")
    micro_batches: int = Field(description="Micro-batches of one data-parallel rank in an optimizer step.")


class Plan(Model):
    """What runs where and how. Written once, read by every process."""

    version: Literal[1] = 1
    world_size: int = Field(description="Trainer ranks.")
    parallelism: dict[str, Parallelism] = Field(description="By trained model: actor, critic, reward.")
    batching: list[Batching]
    schedule: Literal["Serial1F1B"] = Field(default="Serial1F1B", description="Family of the training schedule.")
    tasks: list[TaskPlacement]
    trainers: list[TrainerRank]
    rollouts: list[Rollout]
    warnings: list[str] = Field(default_factory=list, description="Sentences for the user.")
