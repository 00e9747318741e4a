"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating
KL divergence"), and the penalty as a term of the loss. The coefficient's controller needs no torch: it is
`coordinator/loop/kl_controller.py`.

A good estimate of a value need not have a good gradient (Liu et al. 2025, "Rethinking KL Regularization in RLHF"; Tang
and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL"). With r = log p - log p_ref and samples
of p, the KL's gradient is E[r grad log p].

- In the reward, the policy gradient multiplies the estimate with grad log p: k1 = r gives the KL's gradient. k2 gives
  E[r^2/2 grad log p]; k3 = exp(-r) - 1 + r gives the KL's less that of KL(reference || policy), which nearly cancel.
- In the loss, the estimate itself is differentiated: k2 = r^2/2 gives E[r grad log p], the KL's gradient; k1 gives
  E[grad log p] = 0; k3 gives E[(1 - exp(-r)) grad log p], that of KL(reference || policy)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dovetail.trainer.algorithms.masks import inside, kept, wide

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0

Estimator = Literal["k1", "k2", "k3"]


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator of log-probabilities, in float32 or wider, clamped to +-20; exactly 0 (and no gradient)
    outside `mask`.

    exp(20) is 5e8: beyond it a ratio carries no information, and float32 is safe."""
    difference = torch.where(kept(mask), wide(numerator) - wide(denominator), 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator = "k1") -> Tensor:
    """Estimate of KL(policy || reference), nats, at each token: (batch, time), 0 outside `mask`.

    With r = log p - log p_ref, clamped to +-20 for every estimator:
    k1 = r (unbiased, any sign); k2 = r^2/2 (biased, small variance); k3 = exp(-r) - 1 + r (unbiased, not
    negative), its value clamped to 10. These are values to look at; as a penalty, only k1 belongs in a reward
    (`token_rewards`), and none is to be differentiated as it stands: see `kl_loss`. Raises ValueError for another
    name."""
    r = log_ratio(logprobs, ref_logprobs, mask)
    if estimator == "k1":
        return r
    if estimator == "k2":
        return 0.5 * r.square()
    if estimator == "k3":
        return (torch.expm1(-r) + r).clamp(max=K3_LIMIT)
    raise ValueError(f"kl.estimator must be k1, k2 or k3, not {estimator!r}")


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    normaliser: float | Tensor,
    coef: float,
    estimator: Estimator = "k3",
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """coef times the KL penalty as a term of the loss, token mean; `weights` (batch, time) multiply the tokens.

    Its value is that of k2 or k3, its gradient r grad log p of either: k2's own, and put in k3's place straight-through
    (verl's `k3+`), so that both lower KL(policy || reference). Raises ValueError for k1. Stats: the sum `kl_loss`,
    without coef."""
    if estimator == "k1":
        raise ValueError("kl.estimator k1 in the loss has a gradient of 0 on average; use k2 or k3")
    keep = kept(mask)
    now, reference = logprobs.detach(), ref_logprobs.detach()
    value = kl_estimate(now, reference, keep, estimator)
    # The clamped ratio multiplies the gradient: clamping inside would free the tokens that are furthest away.
    slope = log_ratio(now, reference, keep)
    straight = slope * inside(logprobs, keep)
    losses = value + (straight - straight.detach())
    if weights is not None:
        losses = losses * inside(weights.detach(), keep)
    total = losses.sum()
    return coef * total / normaliser, {"kl_loss": total.detach().float()}
