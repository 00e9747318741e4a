"""The policy's loss of a table of tokens, by the door that trainers use."""

from __future__ import annotations

import torch

from dovetail.manifest.training_types import PPO
from dovetail.trainer.algorithms import policy


def loss_inputs(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: PPO):  # type: ignore[no-untyped-def]
    """All (batch, time), where a trainer has (n,): a row is a sample."""
    rows = torch.arange(len(logprobs)).unsqueeze(1).expand(logprobs.shape)
    return policy.LossInputs(
        tokens=torch.zeros(logprobs.shape, dtype=torch.int64),
        sequence_ids=rows,
        mask=mask,
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old,
        ref_logprobs=old,
        advantages=advantages,
        entropy=torch.zeros_like(old),
        config=config,
        kl_coef=0.0,
        samples=len(logprobs),
    )


def policy_loss(  # type: ignore[no-untyped-def]
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    normaliser,
    clip: float = 0.2,
    dual_clip: float | None = None,
    weights: torch.Tensor | None = None,
):
    """(share of the loss, statistics) of the clipped surrogate."""
    inputs = loss_inputs(logprobs, old, advantages, mask, PPO(clip=clip, dual_clip=dual_clip))
    return policy.policy_loss(inputs, policy.load_loss(inputs.config), normaliser=normaliser, weights=weights)
