"""Losses of responses that people preferred or rejected: DPO, IPO and KTO.

Their inputs are log-ratios, log pi(y|x) - log pi_ref(y|x), in nats. Like the losses of `losses.py` they return a share
of the mini-batch's mean, and sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dovetail.manifest.training_types import DPO
from dovetail.trainer.algorithms.losses import Stats


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
