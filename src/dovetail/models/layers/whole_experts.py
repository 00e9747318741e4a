"""Experts whose outputs for a token do not depend on the other tokens of a forward pass, on CPUs.

A matrix product gives each row the same bits only if the number of rows is a multiple of ROWS. How many tokens an
expert gets depends on all tokens of the pass. So tokens of zeros are added until each expert has a multiple of ROWS.
Their outputs are dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from dovetail.models.layers.packing import ROWS

NAME = "dovetail_whole_experts"


def use_whole_experts(model: nn.Module) -> None:
    """Let all experts of a model compute that way. Other models stay as they are."""
    for module in model.modules():
        if hasattr(module, "has_gate"):  # transformers sets it in each class that can compute in several ways
            module.config._experts_implementation = NAME


def whole_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes what transformers' `grouped_mm` computes. `hidden_states`: (tokens, width). `top_k_index`,
    `top_k_weights`: (tokens, experts of a token)."""
    tokens, each = top_k_index.shape
    added = _added(top_k_index, int(self.num_experts), each)
    filled = grouped_mm_experts_forward(
        self,
        torch.cat([hidden_states, hidden_states.new_zeros(len(added), hidden_states.shape[1])]),
        torch.cat([top_k_index, added]),
        torch.cat([top_k_weights, top_k_weights.new_zeros(len(added), each)]),
    )
    return filled[:tokens]


def _added(chosen: Tensor, experts: int, each: int) -> Tensor:
    """The experts (n, each) of the tokens that are added."""
    counts = torch.bincount(chosen.reshape(-1), minlength=experts)
    lacking = -counts % ROWS
    while int(lacking.sum()) % each:  # whole tokens are added
        lacking[0] += ROWS
    return torch.repeat_interleave(torch.arange(experts, device=chosen.device), lacking).to(chosen.dtype).view(-1, each)


ExpertsInterface.register(NAME, whole_experts)
