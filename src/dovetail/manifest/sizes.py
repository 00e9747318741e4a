"""Computes how many pods and ranks a manifest asks for, which models its stages train, and where PPO's values come
from: a critic model, a value head on the actor's body (AC-share), or nothing."""

from __future__ import annotations

from dovetail.manifest.training_types import SHARED_VALUE_COEF
from dovetail.manifest.types import Group, Parallelism, RLHFJobSpec, Role, Stage


def shares_body(spec: RLHFJobSpec) -> bool:
    """Whether a value head on the actor's body takes the critic's place."""
    return spec.ppo.advantage == "gae" and spec.models.critic.share_actor_body


def has_critic(spec: RLHFJobSpec) -> bool:
    """Whether there is a critic model. Group baselines (GRPO, RLOO) and a shared body need none."""
    return spec.ppo.advantage == "gae" and not spec.models.critic.share_actor_body


def value_coef(spec: RLHFJobSpec) -> float:
    """The factor of the value loss. It is lower if the policy's own weights get its gradient too."""
    default = SHARED_VALUE_COEF if shares_body(spec) else 1.0
    return default if spec.ppo.value_coef is None else spec.ppo.value_coef


def world_size(layout: Parallelism) -> int:
    """The number of ranks of the layout."""
    return layout.pp * layout.dp * layout.tp


def pod_count(group: Group) -> int:
    """The number of pods that a group starts with."""
    return group.pods


def draws_on_cpus(spec: RLHFJobSpec) -> bool:
    """Whether some of a job's vLLM servers run on CPUs."""
    return any(Role.ROLLOUT in group.roles and group.on_cpu for group in spec.groups)


def relays_weights(spec: RLHFJobSpec, group: Group) -> bool:
    """Whether the servers of a rollout group send their weights to each other. They do if the job may have several
    servers. They do not if they take turns with trainers, which need the memory for the weights."""
    rollouts = [each for each in spec.groups if Role.ROLLOUT in each.roles]
    most = sum(max(pod_count(each), each.max_replicas or 0) for each in rollouts)
    return most > 1 and Role.TRAINER not in group.roles


def trainer_ranks(group: Group) -> int:
    """The number of trainer ranks of a group. It is one per GPU, or one per pod on CPUs. It is 0 without the trainer
    role."""
    return pod_count(group) * max(1, group.gpu.per_pod) if Role.TRAINER in group.roles else 0


def trainer_world(spec: RLHFJobSpec) -> int:
    """The number of trainer ranks of the whole job."""
    return sum(trainer_ranks(group) for group in spec.groups)


def trained_models(spec: RLHFJobSpec) -> list[str]:
    """The models that the job's stages train, in the order actor, critic, reward."""
    found = []
    if any(stage.model == "actor" for stage in spec.stages):
        found.append("actor")
    if Stage.PPO in spec.stages and has_critic(spec):
        found.append("critic")
    if Stage.REWARD in spec.stages:
        found.append("reward")
    return found


# A model starts from the first of these that has a source.
_CANDIDATES = {
    "actor": ("actor",),
    "reference": ("reference", "actor"),
    "reward": ("reward", "actor"),
    "critic": ("critic", "reward", "actor"),
}
# The models that a job may train.
TRAINED = ("actor", "reward", "critic")


def owner(spec: RLHFJobSpec, model: str) -> str | None:
    """The model whose source `model` starts from. None if none of them has a source."""
    return next((name for name in _CANDIDATES[model] if getattr(spec.models, name).source is not None), None)
