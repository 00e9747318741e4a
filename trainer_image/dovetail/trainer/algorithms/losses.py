"""Losses of SFT, reward modelling, the critic, and of preferred and rejected responses (DPO, IPO, KTO; they take
log-ratios, log pi(y|x) - log pi_ref(y|x), in nats), and the terms that are added to the policy's loss (`policy.py`).

Each takes `normaliser`, the token (or pair) count of the whole mini-batch over all micro-batches and ranks. It returns
its share of the mini-batch's mean. Shares add up to that mean exactly, however the mini-batch is cut. Everything is
computed in float32 or wider. The second result holds detached sums (0-dimensional float32), which also add up over
micro-batches and ranks. `aggregation_weights` turns the token mean into another mean."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dovetail.manifest.training_types import DPO
from dovetail.trainer.algorithms.masks import inside, kept

Stats = dict[str, Tensor]
Aggregation = Literal["Token", "Sequence", "Constant"]


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return inside(x, mask).sum()


def _stat(x: Tensor) -> Tensor:
    return x.detach().float()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    normaliser: float | Tensor,
    clip: float | None = 0.2,
) -> tuple[Tensor, Stats]:
    """The squared error of the values with PPO's clipping, as a token mean. It is 0.5 max((V - R)^2, (V_clip - R)^2).
    V_clip is V clipped to within `clip` of the old value. With `clip` None it is 0.5 (V - R)^2. All tensors (batch,
    time).

    Stats: the count `value_tokens`, and the sums `value_loss` (with the factor 0.5), `value`, `return`,
    `return_square`, `value_error_square` ((V - R)^2, for the explained variance) and `value_clipped` (tokens whose
    clipped error is strictly larger)."""
    keep = kept(mask)
    values, returns = inside(values, keep), inside(returns.detach(), keep)
    plain = (values - returns).square()
    was_clipped = torch.zeros_like(keep)
    losses = plain
    if clip is not None:
        old = inside(old_values.detach(), keep)
        change = values - old
        limited = change.clamp(-clip, clip)
        clipped = (old + limited - returns).square()
        # The two errors also differ within the limit, because by rounding old + (V - old) is seldom V.
        was_clipped = (limited != change) & (clipped > plain)
        losses = torch.maximum(plain, clipped)
    total = 0.5 * _sum(losses, keep)
    stats = {
        "value_tokens": _stat(keep.sum()),
        "value_loss": _stat(total),
        "value": _stat(_sum(values, keep)),
        "return": _stat(_sum(returns, keep)),
        "return_square": _stat(_sum(returns.square(), keep)),
        "value_error_square": _stat(_sum(plain, keep)),
        "value_clipped": _stat(was_clipped.sum()),
    }
    return total / normaliser, stats


def reward_loss(
    chosen: Tensor, rejected: Tensor, *, normaliser: float | Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """Pairwise ranking loss -log sigmoid(r_chosen - r_rejected) (Ouyang et al. 2022, eq. 1), mean over pairs.

    chosen, rejected, mask (pairs,): rewards of a pair's two sequences. The loss is computed in float32 or wider.
    Stats: the count `pairs`, and the sums `reward_loss`, `correct` (chosen strictly above rejected, so a tie is wrong),
    `margin`, `chosen` and `rejected`."""
    if mask is None:
        mask = torch.ones_like(chosen, dtype=torch.bool)
    keep = kept(mask)
    chosen, rejected = inside(chosen, keep), inside(rejected, keep)
    margin = chosen - rejected
    total = _sum(-logsigmoid(margin), keep)
    stats = {
        "pairs": _stat(keep.sum()),
        "reward_loss": _stat(total),
        "correct": _stat((keep & (margin > 0)).sum()),
        "margin": _stat(_sum(margin, keep)),
        "chosen": _stat(_sum(chosen, keep)),
        "rejected": _stat(_sum(rejected, keep)),
    }
    return total / normaliser, stats


def sft_loss(logprobs: Tensor, mask: Tensor, *, normaliser: float | Tensor) -> tuple[Tensor, Stats]:
    """Token cross entropy, nats: -sum(log p) / normaliser over the tokens of `mask`; logprobs, mask (batch, time).

    Stats: the count `tokens`, and the sum `loss`."""
    keep = kept(mask)
    total = -_sum(logprobs, keep)
    return total / normaliser, {"tokens": _stat(keep.sum()), "loss": _stat(total)}


def ptx_loss(logprobs: Tensor, mask: Tensor, *, normaliser: float | Tensor, coef: float) -> tuple[Tensor, Stats]:
    """coef times the language-model loss on demonstrations (PPO-ptx, the last term of eq. 2 in Ouyang et al. 2022).

    `normaliser` counts the mini-batch's ptx tokens, not its response tokens. logprobs, mask (batch, time). Stats
    (without coef): the count `ptx_tokens`, and the sum `ptx_loss`."""
    keep = kept(mask)
    total = -_sum(logprobs, keep)
    stats = {"ptx_tokens": _stat(keep.sum()), "ptx_loss": _stat(total)}
    return coef * total / normaliser, stats


def right_loss(logprobs: Tensor, mask: Tensor, *, normaliser: float | Tensor, coef: float) -> tuple[Tensor, Stats]:
    """coef times the language-model loss on the policy's own right responses, as a token mean. It is -coef / (sum of
    |o| over the right responses o) times the sum of log p of their tokens (VAPO, Yue et al. 2025, section 4.3,
    positive-example language-model loss; coef is its mu).

    `mask`: the tokens of right responses. `normaliser` counts those of the mini-batch. logprobs, mask (batch, time) or
    (n,). Stats (without coef): the count `right_tokens`, and the sum `right_loss`."""
    keep = kept(mask)
    total = -_sum(logprobs, keep)
    return coef * total / normaliser, {"right_tokens": _stat(keep.sum()), "right_loss": _stat(total)}


def entropy_bonus(
    entropy: Tensor, mask: Tensor, *, normaliser: float | Tensor, coef: float, weights: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """-coef times the mean entropy of the policy at the tokens of `mask`. `weights` multiply the tokens.

    entropy (nats), mask, weights (batch, time) or (n,). Stats: the sum `entropy`, without coef and weights."""
    keep = kept(mask)
    plain = _sum(entropy, keep)
    total = plain if weights is None else _sum(inside(entropy, keep) * inside(weights.detach(), keep), keep)
    return -coef * total / normaliser, {"entropy": _stat(plain)}


def aggregation_weights(
    lengths: Tensor, aggregation: Aggregation, *, tokens: float, samples: int, longest: int
) -> Tensor | None:
    """The weight of each token of a sample, (batch,) float64, or None if all are 1. The sum of weighted token losses,
    divided by `tokens`, is the aggregated loss of the mini-batch.

    lengths (batch,): response tokens of some of the mini-batch's samples. `tokens`, `samples`: counts of the whole
    mini-batch. `Token` is the mean over tokens. `Sequence` is the mean over samples of each sample's token mean. A
    sample without tokens counts as 0. `Constant` is the sum over tokens divided by samples * `longest`. Weights depend
    on the mini-batch alone, so shares of micro-batches and ranks add up exactly here too. Raises ValueError for another
    name."""
    if aggregation == "Token":
        return None
    if aggregation == "Sequence":
        return tokens / (samples * lengths.clamp(min=1).double())
    if aggregation == "Constant":
        return torch.full(lengths.shape, tokens / (samples * longest), dtype=torch.float64, device=lengths.device)
    raise ValueError(f"lossAggregation must be Token, Sequence or Constant, not {aggregation!r}")


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    config: DPO,
    *,
    normaliser: float | Tensor,
    kl: float | Tensor = 0.0,
    tokens: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Stats]:
    """Mean loss over pairs. chosen, rejected (pairs,): log-ratios of a pair's two responses, sums over tokens in
    float32 or wider. `tokens` counts the tokens of both, each (pairs,). IPO needs them, because its loss takes means
    over tokens, as in TRL. With h = chosen - rejected:

    DPO (Rafailov et al. 2023, eq. 7): -log sigmoid(beta h). With label smoothing e (conservative DPO, Mitchell 2023):
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).
    IPO (Azar et al. 2023, eq. 17): (h - 1 / (2 beta))^2, with h of the means.
    KTO (Ethayarajh et al. 2024, eq. 8): the mean of w_D (1 - sigmoid(beta (chosen - kl))) and of
    w_U (1 - sigmoid(beta (kl - rejected))). `kl` is `kl_estimate` of the whole batch.

    Stats: the count `pairs`, and the sums `loss`, `correct` (chosen strictly above rejected, so a tie is wrong),
    `chosen` and `rejected` (rewards, beta times the log-ratios) and `margin` (of rewards)."""
    margin = chosen - rejected
    if config.loss == "IPO":
        if tokens is None:
            raise ValueError("the loss IPO needs the number of tokens of each response")
        means = chosen / tokens[0] - rejected / tokens[1]
        losses = (means - 1 / (2 * config.beta)).square()
    elif config.loss == "KTO":
        desirable = config.desirable_weight * (1 - torch.sigmoid(config.beta * (chosen - kl)))
        undesirable = config.undesirable_weight * (1 - torch.sigmoid(config.beta * (kl - rejected)))
        losses = (desirable + undesirable) / 2
    else:
        smoothing = config.label_smoothing
        right, wrong = logsigmoid(config.beta * margin), logsigmoid(-config.beta * margin)
        losses = -(1 - smoothing) * right - smoothing * wrong
    total = losses.sum()
    sums = {
        "loss": total,
        "correct": (margin > 0).sum(),
        "chosen": config.beta * chosen.sum(),
        "rejected": config.beta * rejected.sum(),
        "margin": config.beta * margin.sum(),
    }
    stats = {name: value.detach().float() for name, value in sums.items()}
    return total / normaliser, {"pairs": torch.tensor(float(len(margin))), **stats}


def labelled_loss(
    ratios: Tensor, good: Tensor, config: DPO, *, normaliser: float | Tensor, kl: float | Tensor = 0.0
) -> tuple[Tensor, Stats]:
    """KTO (Ethayarajh et al. 2024, eq. 8) of responses without a partner: the mean over responses of
    w_D (1 - sigmoid(beta (r - kl))) for good ones and w_U (1 - sigmoid(beta (kl - r))) for the others.

    ratios (responses,): log-ratios r; good (responses,) bool. Stats: the counts `responses` and `good`, and the sums
    `loss`, `correct` (r above `kl` if good, else below), `chosen` (beta r of good responses) and `rejected` (beta r of
    the others)."""
    gain = torch.where(good, ratios - kl, kl - ratios)
    weight = torch.where(good, ratios.new_tensor(config.desirable_weight), ratios.new_tensor(config.undesirable_weight))
    total = (weight * (1 - torch.sigmoid(config.beta * gain))).sum()
    rewards = config.beta * ratios
    sums = {
        "loss": total,
        "correct": (gain > 0).sum(),
        "good": good.sum(),
        "chosen": torch.where(good, rewards, 0.0).sum(),
        "rejected": torch.where(good, 0.0, rewards).sum(),
    }
    stats = {name: value.detach().float() for name, value in sums.items()}
    return total / normaliser, {"responses": torch.tensor(float(len(ratios))), **stats}


def kl_estimate(logratios: Tensor) -> float:
    """KTO's z_0 (eq. 8): the mean log-ratio of responses to prompts of other samples, or 0 if the mean is negative."""
    return max(0.0, float(logratios.double().mean()))
