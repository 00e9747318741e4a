"""Generalised advantage estimation as it is defined (Schulman et al. 2016), against which the fast one is checked."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.trainer.algorithms.masks import kept


def gae_recursive(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (batch, tokens), by A_t = delta_t + gamma lam A_{t+1}, from the last token on."""
    with torch.no_grad():
        dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
        keep = kept(mask)
        rewards, values = rewards.to(dtype), values.to(dtype)
        advantages = torch.zeros_like(rewards, dtype=dtype)
        next_advantage = torch.zeros(rewards.shape[0], dtype=dtype, device=rewards.device)
        next_value = torch.zeros_like(next_advantage)
        for t in reversed(range(rewards.shape[1])):
            delta = rewards[:, t] + gamma * next_value - values[:, t]
            here = delta + gamma * lam * next_advantage
            next_advantage = torch.where(keep[:, t], here, next_advantage)
            next_value = torch.where(keep[:, t], values[:, t].to(dtype), next_value)
            advantages[:, t] = torch.where(keep[:, t], here, 0.0)
        return advantages, torch.where(keep, advantages + values, 0.0)
