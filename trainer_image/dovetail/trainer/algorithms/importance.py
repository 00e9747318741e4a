"""The gap between the rollout's log-probabilities and the trainer's, and its correction: truncated importance
sampling (Ionides 2008; for RLHF Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
RL").

With `ppo.lag` the rollout's weights are also older than the trainer's. The same weights then make PPO's objective the
decoupled one (Hilton et al. 2021, "Batch size-invariance for policy optimization"; AReaL, Fu et al. 2025, eq. 5):
the ratio is to the proximal policy, which the trainer recomputes, and each token is weighed by
p_proximal / p_behaviour."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.trainer.algorithms.kl import log_ratio
from dovetail.trainer.algorithms.masks import kept, wide


def truncated_weights(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """Per-token weights min(p_trainer / p_rollout, cap), (batch, time), 0 outside `mask`, without gradient.

    `logprobs` are the trainer's at the weights with which the iteration begins (the old or proximal policy's), not
    those being optimised: the ratio of the update itself is the policy loss's. An upper cap only, no lower one."""
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


def staleness_metrics(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, weights: Tensor | None, cap: float = 2.0
) -> dict[str, float]:
    """How far the policy has moved since it drew the samples, over the tokens of `mask`; all tables (batch, time). The
    same gap as in `mismatch_metrics`, where it is an error.

    `logprobs` are the proximal policy's, `rollout_logprobs` the behaviour policy's, `weights` those that the loss
    uses; None: it uses none, and `effective_sample_size` is of the weights that it would use. Returns token means:
    `behaviour_kl`, k1 of KL(behaviour || proximal) in nats; `importance_ratio`, of p_proximal / p_behaviour, near 1
    whatever the distance; `importance_capped`, the share above `cap`; and `effective_sample_size`, (sum w)^2 /
    (n sum w^2), a share of the n tokens (Kish 1965). All 0 without tokens."""
    if weights is None:
        weights = truncated_weights(logprobs, rollout_logprobs, mask, cap)
    sums = mismatch_metrics(logprobs, rollout_logprobs, mask, cap)
    n = max(1.0, float(sums["mismatch_tokens"]))
    w = weights.double()  # 0 outside the mask
    return {
        "behaviour_kl": float(sums["mismatch_kl"]) / n,
        "importance_ratio": float(sums["mismatch_ratio"]) / n,
        "importance_capped": float(sums["mismatch_capped"]) / n,
        "effective_sample_size": float(w.sum() ** 2 / (n * w.square().sum())) if bool((w > 0).any()) else 0.0,
    }
