"""Causal attention within each of several sequences that lie one after the other, for transformers' layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dovetail.models.packing import Packing

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
    packing: Packing | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, total, D), key and value (1, key heads, total, D): sequences as `packing` says. Without it: (B,
    heads, T, D), every row a sequence. Returns (1 or B, total or T, heads, D) as transformers wants it. There is no
    dropout."""
    if packing is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
        return plain
    lengths = packing.lengths
    if packing.prefixes is None and len(set(lengths)) == 1:
        block = (x[0].unflatten(1, (len(lengths), -1)).transpose(0, 1) for x in (query, key, value))
        output, _ = sdpa_attention_forward(module, *block, None, scaling=scaling)
        return output.flatten(0, 1).unsqueeze(0), None
    if query.is_cuda and in_one_call(query.dtype, query.shape[-1]):
        return flash(query, key, value, packing, scaling), None
    # Each sequence by itself: on a CPU as fast as a block of them, and without what padding costs.
    prefixes = packing.prefixes or (None,) * len(lengths)
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    outputs = [
        _one(q, k, v, None, scaling)
        if prefix is None
        else _one(q, torch.cat([keys[prefix], k], 2), torch.cat([values[prefix], v], 2), lengths[prefix], scaling)
        for q, k, v, prefix in zip(queries, keys, values, prefixes, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


def in_one_call(dtype: torch.dtype, width: int) -> bool:
    """Whether a GPU computes the attention of all sequences of a pass in one call, for heads of that width."""
    return dtype == torch.bfloat16 and width % 8 == 0 and width <= _LARGEST_HEAD


def _one(query: Tensor, key: Tensor, value: Tensor, before: int | None, scaling: float | None) -> Tensor:
    """One sequence, with `before` tokens before it that have keys and values only."""
    mask = None
    if before is not None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(before)
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    ).transpose(1, 2)


@cache
def _shares_keys(function: Callable[..., Any]) -> bool:
    """Whether several query heads may read one key head: since torch 2.12."""
    return "enable_gqa" in inspect.signature(function).parameters


def flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """`attend` of all sequences in one call. Keys and values of a prefix are repeated for each that goes on from it."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = packing.starts, max(packing.lengths)
    key_starts, longest_keys = starts, longest
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packing.prefixes is not None:
        index, key_starts = packing.keys
        k, v, longest_keys = k[index], v[index], packing.longest
    # Causal, and aligned at the end where there are more keys than queries (flash attention since 2.1).
    causal = (-1, 0)
    options: dict[str, Any] = {"scale": scaling, "window_size": causal}
    if (repeats := q.shape[1] // k.shape[1]) > 1:
        if _shares_keys(varlen_attn):
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    found: Any = varlen_attn(q, k, v, starts, key_starts, longest, longest_keys, **options)
    return torch.as_tensor(found).unsqueeze(0)


AttentionInterface.register(NAME, attend)
