"""Limits of the reward that depend on its source."""

from __future__ import annotations

from dovetail.manifest.training_types import REWARD_CLIP
from dovetail.manifest.types import PPO, RLHFJobSpec, Stage


def reward_clip(spec: RLHFJobSpec) -> float | None:
    """The limit to which scores are clipped, above and below 0. None if they are not clipped. The author of a function,
    or of a reward model from elsewhere, decides its scale. Clipping could make different rewards equal."""
    if spec.ppo.reward_clip != "Auto":
        return spec.ppo.reward_clip
    trained = not spec.models.reward.calls and Stage.REWARD in spec.stages
    return REWARD_CLIP if trained else None


def ppo_config(spec: RLHFJobSpec) -> PPO:
    """`spec.ppo` with `rewardClip: Auto` decided."""
    return spec.ppo.model_copy(update={"reward_clip": reward_clip(spec)})
