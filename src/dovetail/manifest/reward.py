"""Limits of the reward that depend on its source."""

from __future__ import annotations

from dovetail.manifest.training_types import REWARD_CLIP
from dovetail.manifest.types import PPO, RLHFJobSpec, Stage


def reward_clip(spec: RLHFJobSpec) -> float | None:
    """Scores are clipped to +- this; None: they are not. The scale of a function, or of a reward model from elsewhere,
    is its author's: a bound of ours would flatten it."""
    if spec.ppo.reward_clip != "Auto":
        return spec.ppo.reward_clip
    trained = not spec.models.reward.calls and Stage.REWARD in spec.stages
    return REWARD_CLIP if trained else None


def ppo_config(spec: RLHFJobSpec) -> PPO:
    """`spec.ppo` with `rewardClip: Auto` decided."""
    return spec.ppo.model_copy(update={"reward_clip": reward_clip(spec)})
