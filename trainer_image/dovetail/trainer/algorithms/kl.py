"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating
KL divergence"), and the KL penalty as a term of the loss. `coordinator/loop/ppo_stage.py` adapts the coefficient.

A good estimate of a value need not have a good gradient (Liu et al. 2025, "Rethinking KL Regularization in RLHF"; Tang
and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL"). With r = log p - log p_ref and samples
of p, the KL's gradient is E[r grad log p].

- In the reward, the policy gradient multiplies the estimate with grad log p. k1 = r gives the KL's gradient. k2 gives
  E[r^2/2 grad log p]. k3 = exp(-r) - 1 + r gives the KL's gradient less that of KL(reference || policy); the two
  nearly cancel.
- In the loss, the estimate itself is differentiated. k2 = r^2/2 gives E[r grad log p], the KL's gradient. k1 gives
  E[grad log p] = 0. k3 gives E[(1 - exp(-r)) grad log p], the gradient of KL(reference || policy)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dovetail.protocol.experience import LOG_RATIO_LIMIT
from dovetail.trainer.algorithms.masks import inside, kept, wide

K3_LIMIT = 10.0

Estimator = Literal["k1", "k2", "k3"]


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator of log-probabilities, in float32 or wider, clamped to +-20. It is exactly 0 outside
    `mask` and has no gradient there. All tensors (batch, time) or (n,).

    exp(20) is 5e8. A larger ratio carries no information, and this one is safe in float32."""
    difference = torch.where(kept(mask), wide(numerator) - wide(denominator), 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator = "k1") -> Tensor:
    """The estimate of KL(policy || reference) at each token in nats, (batch, time). It is 0 outside `mask`.

    With r = log p - log p_ref, clamped to +-20 for every estimator: k1 = r is unbiased and has any sign. k2 = r^2/2 is
    biased and has a small variance. k3 = exp(-r) - 1 + r is unbiased and not negative; its value is clamped to 10.

    These values are for metrics. As a penalty, only k1 belongs in a reward (`token_rewards`), and none should be
    differentiated as it is. See `kl_loss`. Raises ValueError for another name."""
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

    The value is that of k2 or k3. The gradient is r grad log p for both, so that both lower KL(policy || reference).
    This is k2's own gradient. For k3 a straight-through estimator replaces the gradient by it (verl's `k3+`). Stats:
    the sum `kl_loss`, without coef. Raises ValueError for k1."""
    if estimator == "k1":
        raise ValueError("kl.estimator k1 in the loss has a gradient of 0 on average; use k2 or k3")
    keep = kept(mask)
    now, reference = logprobs.detach(), ref_logprobs.detach()
    value = kl_estimate(now, reference, keep, estimator)
    # The clamped ratio multiplies the gradient. Autograd through the clamp would give the furthest tokens no gradient.
    slope = log_ratio(now, reference, keep)
    surrogate = slope * inside(logprobs, keep)
    losses = value + (surrogate - surrogate.detach())
    if weights is not None:
        losses = losses * inside(weights.detach(), keep)
    total = losses.sum()
    return coef * total / normaliser, {"kl_loss": total.detach().float()}
