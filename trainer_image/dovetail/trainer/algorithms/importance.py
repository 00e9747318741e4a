"""The gap between the rollout's log-probabilities and the trainer's, and its correction by truncated importance
sampling (Ionides 2008; for RLHF Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
RL").

With `ppo.lag` the rollout's weights are also older than the trainer's. The same weights then give the decoupled PPO
objective (Hilton et al. 2021, "Batch size-invariance for policy optimization"; AReaL, Fu et al. 2025, eq. 5). Its
ratio is to the proximal policy, whose log-probabilities the trainer computes again, and each token is weighted by
p_proximal / p_behaviour."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.trainer.algorithms.kl import log_ratio
from dovetail.trainer.algorithms.masks import kept, wide


def truncated_weights(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """Per-token weights min(p_trainer / p_rollout, cap), (batch, time), 0 outside `mask`, without gradient.

    All tensors are (batch, time). `logprobs` are those of the weights with which the iteration begins (the old or
    proximal policy), not of the weights that are trained: the policy loss has that ratio itself. There is an upper cap
    and no lower one. Raises ValueError for a cap that is not above 0."""
    if cap <= 0:
        raise ValueError(f"importanceSampling.cap must be above 0, not {cap}")
    keep = kept(mask)
    ratio = log_ratio(logprobs.detach(), rollout_logprobs.detach(), keep).exp()
    return torch.where(keep, ratio.clamp(max=cap), 0.0)


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float = 2.0) -> dict[str, Tensor]:
    """Measures of the difference between trainer and rollout, over the tokens of `mask`. All inputs are (batch, time),
    and results are float32.

    Most results are sums. Add them over micro-batches and ranks and divide by `mismatch_tokens`: `mismatch_abs` is |d
    log p| in nats, `mismatch_kl` is log p_rollout - log p_trainer (k1 of KL(rollout || trainer)), `mismatch_ratio` is
    p_trainer / p_rollout, and `mismatch_capped` counts the tokens above `cap`. `mismatch_abs_max` is a maximum: reduce
    it by max. The logarithm of the ratio is clamped to +-20, but the differences are not."""
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
    """Measures of how far the policy has moved since it drew the samples, over the tokens of `mask`. All tables are
    (batch, time). It is the same gap as in `mismatch_metrics`. There it is an error, but here it is expected.

    `logprobs` are the proximal policy's, `rollout_logprobs` the behaviour policy's, and `weights` those of the loss. If
    `weights` is None, the loss uses none, and `effective_sample_size` is that of the weights that it would use. Returns
    token means: `behaviour_kl`, k1 of KL(behaviour || proximal) in nats; `importance_ratio`, p_proximal / p_behaviour,
    which is near 1 whatever the distance; `importance_capped`, the share of tokens above `cap`; and
    `effective_sample_size`, (sum w)^2 / (n sum w^2), a share of the n tokens (Kish 1965). All are 0 without tokens."""
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
