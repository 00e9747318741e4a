"""Causal attention within each of several sequences that lie one after the other, for transformers' layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "dovetail"
# Of torch's flash attention, which takes all sequences in one call.
_LARGEST_HEAD = 192


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    lengths: tuple[int, ...] | None = None,
    starts: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, total, D), key and value (1, key heads, total, D): sequences of `lengths`, which begin at
    `starts` (sequences + 1,) int32. Without `lengths`: (B, heads, T, D), every row a sequence. Returns
    (1 or B, total or T, heads, D) as transformers wants it. There is no dropout."""
    if lengths is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
        return plain
    if len(set(lengths)) == 1:
        block = (x[0].unflatten(1, (len(lengths), -1)).transpose(0, 1) for x in (query, key, value))
        output, _ = sdpa_attention_forward(module, *block, None, scaling=scaling)
        return output.flatten(0, 1).unsqueeze(0), None
    grouped = key.shape[1] != query.shape[1]
    width = query.shape[-1]
    if query.is_cuda and query.dtype == torch.bfloat16 and width % 8 == 0 and width <= _LARGEST_HEAD:
        from torch.nn.attention.varlen import varlen_attn

        flat = (x[0].transpose(0, 1) for x in (query, key, value))
        longest = max(lengths)
        causal = (-1, 0)
        found: Any = varlen_attn(
            *flat, starts, starts, longest, longest, scale=scaling, window_size=causal, enable_gqa=grouped
        )
        return found.unsqueeze(0), None
    # Each sequence by itself: on a CPU as fast as a block of them, and without what padding costs.
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped).transpose(1, 2)
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(NAME, attend)
