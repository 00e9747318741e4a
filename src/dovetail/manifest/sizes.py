"""How many pods and ranks a manifest asks for, and which models its stages train."""

from __future__ import annotations

from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import Group, Parallelism, RLHFJobSpec, Role, Stage


def world_size(layout: Parallelism) -> int:
    """Ranks that the layout occupies."""
    return layout.pp * layout.dp * layout.tp


def pod_count(group: Group) -> int:
    """Pods that a group starts with: replicas, else minReplicas, else 1."""
    return group.replicas or group.min_replicas or 1


def relays_weights(spec: RLHFJobSpec, group: Group) -> bool:
    """Whether the servers of a group of rollouts send their weights to others, and take them from others. They do if
    the job may have several, unless they take turns with trainers: these need the memory that weights would go to."""
    rollouts = [each for each in spec.groups if Role.ROLLOUT in each.roles]
    most = sum(max(pod_count(each), each.max_replicas or 0) for each in rollouts)
    return most > 1 and Role.TRAINER not in group.roles


def trainer_ranks(group: Group) -> int:
    """Trainer ranks of a group: one a GPU, one a pod on CPUs; 0 without the trainer role."""
    return pod_count(group) * max(1, group.gpu.per_pod) if Role.TRAINER in group.roles else 0


def trainer_world(spec: RLHFJobSpec) -> int:
    """Trainer ranks of the whole job."""
    return sum(trainer_ranks(group) for group in spec.groups)


def trained_models(spec: RLHFJobSpec) -> list[str]:
    """Models that the job's stages train, in the order actor, critic, reward."""
    found = []
    if any(stage.model == "actor" for stage in spec.stages):
        found.append("actor")
    if Stage.PPO in spec.stages and has_critic(spec):
        found.append("critic")
    if Stage.REWARD in spec.stages:
        found.append("reward")
    return found
