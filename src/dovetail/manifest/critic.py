"""Where PPO's values come from: a critic model, a value head on the actor's body (AC-share), or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dovetail.manifest.training import SHARED_VALUE_COEF, Optimizer
from dovetail.manifest.types import Dtype, RLHFJobSpec


def shares_body(spec: RLHFJobSpec) -> bool:
    """Whether a value head on the actor's body takes the critic's place."""
    return spec.ppo.advantage == "gae" and spec.models.critic.share_actor_body


def has_critic(spec: RLHFJobSpec) -> bool:
    """Whether there is a critic model: group baselines (GRPO, RLOO) need none, nor does a shared body."""
    return spec.ppo.advantage == "gae" and not spec.models.critic.share_actor_body


def value_coef(spec: RLHFJobSpec) -> float:
    """Factor of the value loss; less where the policy's own weights get its gradient too."""
    default = SHARED_VALUE_COEF if shares_body(spec) else 1.0
    return default if spec.ppo.value_coef is None else spec.ppo.value_coef


class SharedBodyRule(NamedTuple):
    """What cannot go with a shared body: `broken` says that a spec has it, the CEL expression `kept` that it has not
    (None: CEL cannot see the field)."""

    broken: Callable[[RLHFJobSpec], bool]
    kept: str | None
    message: str


def _pins_critic(spec: RLHFJobSpec) -> bool:
    return spec.plan.parallelism != "Auto" and spec.plan.parallelism.critic is not None


_SHARED = "cannot go with spec.models.critic.shareActorBody"
_OWN = "which leaves no critic model; remove one of them."
_OPTIMIZER = {
    name: repr(value) if isinstance(value, str) else str(value).lower()
    for name, value in Optimizer().model_dump(mode="json", by_alias=True).items()
}

SHARED_BODY_RULES: tuple[SharedBodyRule, ...] = (
    SharedBodyRule(
        lambda spec: spec.models.critic.source is not None,
        "!has(self.models.critic.source)",
        f"spec.models.critic.source {_SHARED}, {_OWN}",
    ),
    SharedBodyRule(
        lambda spec: spec.models.critic.lora is not None,
        "!has(self.models.critic.lora)",
        f"spec.models.critic.lora {_SHARED}, {_OWN}",
    ),
    SharedBodyRule(
        lambda spec: spec.models.critic.dtype is not Dtype.AUTO,
        "self.models.critic.dtype == 'Auto'",
        f"spec.models.critic.dtype {_SHARED}, {_OWN}",
    ),
    SharedBodyRule(
        lambda spec: spec.ppo.critic_optimizer != Optimizer(),
        " && ".join(f"self.ppo.criticOptimizer.{name} == {value}" for name, value in _OPTIMIZER.items()),
        f"spec.ppo.criticOptimizer {_SHARED}: spec.ppo.actorOptimizer steps both heads; remove it.",
    ),
    SharedBodyRule(
        lambda spec: spec.ppo.critic_warmup_iterations > 0,
        "self.ppo.criticWarmupIterations == 0",
        f"spec.ppo.criticWarmupIterations {_SHARED}: the value head does not train without the actor; remove it.",
    ),
    SharedBodyRule(
        _pins_critic,
        None,
        f"spec.plan.parallelism.critic {_SHARED}, {_OWN}",
    ),
    SharedBodyRule(
        lambda spec: spec.plan.intra_stage_fusion not in ("Auto", "Serial"),
        "self.plan.intraStageFusion in ['Auto', 'Serial']",
        f"spec.plan.intraStageFusion Fused, TimeSharing or Dedicated {_SHARED}, which leaves one model to train; set "
        "it to Auto or Serial.",
    ),
)
