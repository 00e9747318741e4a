"""The gap between the rollout's log-probabilities and the trainer's, and its correction: truncated importance
sampling (Ionides 2008; for RLHF Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
RL")."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.trainer.algorithms.kl import log_ratio
from dovetail.trainer.algorithms.masks import kept, wide


def truncated_weights(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """Per-token weights min(p_trainer / p_rollout, cap), (batch, time), 0 outside `mask`, without gradient.

    `logprobs` are the trainer's at the weights that sampled (the old policy's), not those being optimised:
    the ratio of the update itself is the policy loss's. An upper cap only, no lower one."""
    if cap <= 0:
        raise ValueError(f"importanceSampling.cap must be above 0, not {cap}")
    keep = kept(mask)
    ratio = log_ratio(logprobs.detach(), rollout_logprobs.detach(), keep).exp()
    return torch.where(keep, ratio.clamp(max=cap), 0.0)


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float = 2.0) -> dict[str, Tensor]:
    """How far trainer and rollout disagree, over the tokens of `mask`.

    Sums, to be added over micro-batches and ranks and divided by `mismatch_tokens`: `mismatch_abs` |d log p|,
    `mismatch_kl` log p_rollout - log p_trainer (k1 of KL(rollout || trainer)), `mismatch_ratio`,
    `mismatch_capped` (tokens above `cap`). A maximum, to be reduced by max: `mismatch_abs_max`.
    The ratio's logarithm is clamped to +-20, the others are raw."""
    keep = kept(mask)
    difference = torch.where(keep, wide(logprobs.detach()) - wide(rollout_logprobs.detach()), 0.0).float()
    ratio = log_ratio(logprobs.detach(), rollout_logprobs.detach(), keep).float().exp()
    size = difference.abs()
    return {
        "mismatch_tokens": keep.sum().float(),
        "mismatch_abs": size.sum(),
        "mismatch_kl": -difference.sum(),
        "mismatch_ratio": torch.where(keep, ratio, 0.0).sum(),
        "mismatch_capped": (keep & (ratio > cap)).sum().float(),
        "mismatch_abs_max": size.max() if size.numel() else size.new_zeros(()),
    }
