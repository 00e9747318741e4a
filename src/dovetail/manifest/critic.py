"""Says where PPO's values come from. That is a critic model, a value head on the actor's body (AC-share), or
nothing."""

from __future__ import annotations

from dovetail.manifest.training_types import SHARED_VALUE_COEF
from dovetail.manifest.types import RLHFJobSpec


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
