"""Losses of SFT, reward modelling and PPO.

Each takes `normaliser`, the token (or pair) count of the whole mini-batch over all micro-batches and ranks,
and returns its share of the mini-batch's mean: shares add up to that mean exactly, however the mini-batch is
cut. The second result holds detached sums (0-dimensional float32) that add over micro-batches and ranks
likewise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dovetail.trainer.algorithms.kl import log_ratio

Stats = dict[str, Tensor]


def _inside(x: Tensor, mask: Tensor) -> Tensor:
    """x, and 0 outside the mask. Done to every input first: a nan in the padding must reach neither the loss
    nor, through 0 * nan in a backward pass, the gradient."""
    return torch.where(mask.bool(), x, 0.0)


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return _inside(x, mask).sum()


def _stat(x: Tensor) -> Tensor:
    return x.detach().float()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    normaliser: float | Tensor,
    clip: float = 0.2,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated, token mean.

    Per token with ratio r = exp(log p - log p_old), the exponent clamped to +-20:
    max(-A r, -A clip(r, 1-clip, 1+clip)); with `dual_clip` c (Ye et al. 2020, eq. 5), where A < 0, at most -A
    c. `weights` multiply the token losses (truncated importance sampling). All tensors (batch, time).

    Stats: `tokens`; sums `policy_loss`, `ratio`, `clipped` (tokens whose clipped branch is strictly the
    larger loss), `dual_clipped` (tokens bounded by c), `approx_kl` (k3 of KL(old || new), (r - 1) - log
    r)."""
    log_r = log_ratio(logprobs, old_logprobs.detach(), mask)
    ratio = log_r.exp()
    advantages = _inside(advantages.detach(), mask)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip, 1.0 + clip)
    losses = torch.maximum(plain, clipped)
    keep = mask.bool()
    was_clipped = keep & (clipped > plain)
    was_dual = torch.zeros_like(was_clipped)
    if dual_clip is not None:
        if dual_clip <= 1.0:
            raise ValueError(f"dualClip must be above 1, not {dual_clip}")
        bound = -advantages * dual_clip
        was_dual = keep & (advantages < 0) & (losses > bound)
        losses = torch.where(was_dual, bound, losses)
    if weights is not None:
        losses = losses * _inside(weights.detach(), mask)
    total = _sum(losses, mask)
    log_r, ratio = log_r.detach(), ratio.detach()
    stats = {
        "tokens": _stat(keep.sum()),
        "policy_loss": _stat(total),
        "ratio": _stat(_sum(ratio, mask)),
        "clipped": _stat(was_clipped.sum()),
        "dual_clipped": _stat(was_dual.sum()),
        "approx_kl": _stat(_sum(torch.expm1(log_r) - log_r, mask)),
    }
    return total / normaliser, stats


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    normaliser: float | Tensor,
    clip: float | None = 0.2,
) -> tuple[Tensor, Stats]:
    """Squared error of the values with PPO's clipping, token mean: 0.5 max((V - R)^2, (V_clip - R)^2), where
    V_clip is V kept within `clip` of the old value; `clip` None: 0.5 (V - R)^2. All tensors (batch, time).

    Stats: `value_tokens`; sums `value_loss` (with the factor 0.5), `value`, `return`, `return_square`,
    `value_error_square` ((V - R)^2, for the explained variance), `value_clipped` (clipped branch strictly
    larger)."""
    values, returns = _inside(values, mask), _inside(returns.detach(), mask)
    plain = (values - returns).square()
    keep = mask.bool()
    was_clipped = torch.zeros_like(keep)
    losses = plain
    if clip is not None:
        old = _inside(old_values.detach(), mask)
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        was_clipped = keep & (clipped > plain)
        losses = torch.maximum(plain, clipped)
    total = 0.5 * _sum(losses, mask)
    stats = {
        "value_tokens": _stat(keep.sum()),
        "value_loss": _stat(total),
        "value": _stat(_sum(values, mask)),
        "return": _stat(_sum(returns, mask)),
        "return_square": _stat(_sum(returns.square(), mask)),
        "value_error_square": _stat(_sum(plain, mask)),
        "value_clipped": _stat(was_clipped.sum()),
    }
    return total / normaliser, stats


def reward_loss(
    chosen: Tensor, rejected: Tensor, *, normaliser: float | Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """Pairwise ranking loss -log sigmoid(r_chosen - r_rejected) (Ouyang et al. 2022, eq. 1), mean over pairs.

    chosen, rejected, mask (pairs,): rewards of a pair's two sequences. Computed in float32 or wider.
    Stats: `pairs`; sums `reward_loss`, `correct` (chosen strictly above rejected: a tie is wrong), `margin`,
    `chosen`, `rejected`."""
    if mask is None:
        mask = torch.ones_like(chosen, dtype=torch.bool)
    wide = torch.promote_types(chosen.dtype, torch.float32)
    chosen, rejected = _inside(chosen.to(wide), mask), _inside(rejected.to(wide), mask)
    margin = chosen - rejected
    total = _sum(-logsigmoid(margin), mask)
    stats = {
        "pairs": _stat(mask.bool().sum()),
        "reward_loss": _stat(total),
        "correct": _stat((mask.bool() & (margin > 0)).sum()),
        "margin": _stat(_sum(margin, mask)),
        "chosen": _stat(_sum(chosen, mask)),
        "rejected": _stat(_sum(rejected, mask)),
    }
    return total / normaliser, stats


def sft_loss(logprobs: Tensor, mask: Tensor, *, normaliser: float | Tensor) -> tuple[Tensor, Stats]:
    """Token cross entropy, nats: -sum(log p) / normaliser over the tokens of `mask`, (batch, time).

    Stats: `tokens`, and the sum `loss`."""
    total = -_sum(logprobs, mask)
    return total / normaliser, {"tokens": _stat(mask.bool().sum()), "loss": _stat(total)}


def ptx_loss(logprobs: Tensor, mask: Tensor, *, normaliser: float | Tensor, coef: float) -> tuple[Tensor, Stats]:
    """coef times the language-model loss on demonstrations (Ouyang et al. 2022, eq. 2's last term, PPO-ptx).

    `normaliser` counts the mini-batch's ptx tokens, not its responses'. Stats (without coef): `ptx_tokens`,
    `ptx_loss`."""
    total = -_sum(logprobs, mask)
    stats = {"ptx_tokens": _stat(mask.bool().sum()), "ptx_loss": _stat(total)}
    return coef * total / normaliser, stats


def entropy_bonus(entropy: Tensor, mask: Tensor, *, normaliser: float | Tensor, coef: float) -> tuple[Tensor, Stats]:
    """-coef times the mean entropy (nats) of the policy at the tokens of `mask`. Stats: the sum `entropy`."""
    total = _sum(entropy, mask)
    return -coef * total / normaliser, {"entropy": _stat(total)}
