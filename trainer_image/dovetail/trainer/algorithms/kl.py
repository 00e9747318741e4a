"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating
KL divergence"). The coefficient's controller is `dovetail.coordinator.kl`: it needs no torch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0

Estimator = Literal["k1", "k2", "k3"]


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator of log-probabilities, clamped to +-20; exactly 0 (and no gradient) outside
    `mask`.

    exp(20) is 5e8: beyond it a ratio carries no information, and float32 is safe."""
    difference = torch.where(mask.bool(), numerator - denominator, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator = "k1") -> Tensor:
    """Estimate of KL(policy || reference), nats, at each token: (batch, time), 0 outside `mask`.

    With r = log p - log p_ref, clamped to +-20 for every estimator:
    k1 = r (unbiased, any sign); k2 = r^2/2 (biased, small variance); k3 = exp(-r) - 1 + r (unbiased, not
    negative), its value clamped to 10. Raises ValueError for another name."""
    r = log_ratio(logprobs, ref_logprobs, mask)
    if estimator == "k1":
        return r
    if estimator == "k2":
        return 0.5 * r.square()
    if estimator == "k3":
        return (torch.expm1(-r) + r).clamp(max=K3_LIMIT)
    raise ValueError(f"kl.estimator must be k1, k2 or k3, not {estimator!r}")
