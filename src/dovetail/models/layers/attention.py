"""Computes causal attention within each of several packed sequences, for transformers' layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dovetail.models.layers.packing import Packing
from dovetail.protocol.budgets import RESPONSE_BLOCK, SCORE_BYTES

NAME = "dovetail"
# The widest head of torch's flash attention, which computes all sequences in one call.
_LARGEST_HEAD = 192
# On CPUs, sequences that attend to at most so many keys are computed with others of the same shape.
_SHORT = 4 * RESPONSE_BLOCK


class Reach(NamedTuple):
    """Says which keys a query attends to. They are the keys up to its own position. With a `window` they are only the
    last `window` of these. `before` is the number of keys before the first query. It is an int, or a (B, 1, 1, 1)
    tensor on the device."""

    before: int | Tensor
    window: int | None

    def mask(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """The mask of these queries and keys, bool. It is (rows, keys), or (B, 1, rows, keys) if sequences begin at
        different positions."""
        where = self.before + torch.arange(rows.start, rows.stop, device=device).view(-1, 1)
        of_keys = torch.arange(keys.start, keys.stop, device=device)
        mask = of_keys <= where
        return mask if self.window is None else mask & (of_keys > where - self.window)

    def keys(self, rows: slice, count: int) -> slice:
        """The keys among `count` that any of these queries attends to. It is all keys if only the device knows
        `before`."""
        if not isinstance(self.before, int):
            return slice(0, count)
        first = 0 if self.window is None else max(0, self.before + rows.start - self.window + 1)
        return slice(first, min(count, self.before + rows.stop))


class ScoreSettings(NamedTuple):
    """Says how attention scores are computed. `scaling` is the factor of the products of queries and keys. If it is
    None, the width of a head decides. A token attends to itself and the `window` - 1 tokens before it, or to all tokens
    before it if `window` is None. tanh keeps the scores within `softcap`. `sinks` (heads,) are the scores of a key that
    has no value."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def fused(self, longest: int) -> bool:
        """Whether torch's plain causal attention can compute sequences of at most `longest` tokens."""
        return self.softcap is None and self.sinks is None and (self.window is None or longest <= self.window)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Computes attention for a transformers layer. There is no dropout.

    `query` (1, heads, total, D), and `key` and `value` (1, key heads, total, D), hold the sequences that `packing`
    describes. If ranks share the tokens (`Packing.ranks`), they are all heads of this rank's tokens, and so is the
    result. Without `packing` they are (B, heads, T, D), and every row is a sequence. Returns (1, total, heads, D) or
    (B, T, heads, D), as transformers wants it. transformers gives the names of the last three arguments: see
    `ScoreSettings`."""
    scores = ScoreSettings(scaling, sliding_window, softcap, s_aux)
    if packing is None:
        return _rows(module, query, key, value, attention_mask, scores), None
    ranks = packing.ranks
    if ranks.size == 1:
        return _packed(module, query, key, value, packing, scores), None
    if s_aux is not None:
        scores = scores._replace(sinks=s_aux.chunk(ranks.size)[ranks.rank])
    q, k, v = (ranks.to_heads(x, packing.total) for x in (query, key, value))
    output = _packed(module, q, k, v, packing, scores)
    return ranks.to_tokens(output.transpose(1, 2)).transpose(1, 2).contiguous(), None


def _packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: ScoreSettings
) -> Tensor:
    """Does the work of `attend` for all tokens of packed sequences."""
    lengths = packing.lengths
    if packing.pasts is not None:
        return _with_pasts(module, query, key, value, packing, scores)
    if packing.prefixes is None and len(set(lengths)) == 1:
        q, k, v = (x[0].unflatten(1, (len(lengths), -1)).transpose(0, 1) for x in (query, key, value))
        return _rows(module, q, k, v, None, scores).flatten(0, 1).unsqueeze(0)
    plain = scores.softcap is None and scores.sinks is None
    if query.is_cuda and plain and in_one_call(query.dtype, query.shape[-1]):
        return flash(query, key, value, packing, scores.scaling, scores.window)
    if query.is_cuda:
        return by_blocks(query, key, value, packing, scores)
    # On a CPU, sequences run one by one, or with others of their length. That is as fast as a padded block of them.
    return _by_sequences(query, _joined(module, key, value, packing), packing, scores)


def _with_pasts(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: ScoreSettings
) -> Tensor:
    """Does the work of `attend` if some sequences continue a cache."""
    joined = _joined(module, key, value, packing)
    plain = scores.softcap is None and scores.sinks is None
    if query.is_cuda and plain and in_one_call(query.dtype, query.shape[-1]):
        return flash(query, key, value, packing, scores.scaling, scores.window, joined)
    return _by_sequences(query, joined, packing, scores)


def _joined(module: nn.Module, key: Tensor, value: Tensor, packing: Packing) -> list[tuple[Tensor, Tensor]]:
    """The keys and values that each sequence attends to, (1, key heads, n, D). They are those of its cache or prefix,
    and its own. Afterwards the caches hold them."""
    lengths = packing.lengths
    keys, values = (x.split(lengths, dim=2) for x in (key, value))
    prefixes = packing.prefixes or (None,) * len(lengths)
    pasts = packing.pasts or (None,) * len(lengths)
    found = []
    for k, v, prefix, past in zip(keys, values, prefixes, pasts, strict=True):
        earlier = None if prefix is None else (keys[prefix], values[prefix])
        if past is not None and past.tokens:
            earlier = past.cache.layers[_number(module)]
        whole = (k, v) if earlier is None else (torch.cat([earlier[0], k], 2), torch.cat([earlier[1], v], 2))
        if past is not None:
            past.cache.layers[_number(module)] = whole
        found.append(whole)
    return found


def _number(module: nn.Module) -> int:
    """The number of the layer whose attention this is."""
    return int(module.layer_idx)  # type: ignore[arg-type]


def _by_sequences(
    query: Tensor, joined: Sequence[tuple[Tensor, Tensor]], packing: Packing, scores: ScoreSettings
) -> Tensor:
    """Does the work of `attend` for one sequence after another. The tokens after a prefix or cache are computed in
    blocks (`RESPONSE_BLOCK`). The operands of each block have the same shapes and strides, however the sequence is
    divided into parts. Short blocks of the same shape are computed in one call, which gives the same bits for less."""
    blocks: list[tuple[Tensor, Tensor, Tensor]] = []
    alike: dict[tuple[int, ...], list[int]] = {}
    # With several threads, a matrix product's last bits depend on how many heads and sequences share the threads.
    plain = scores.softcap is None and scores.sinks is None and torch.get_num_threads() == 1
    for q, (k, v), before in zip(query.split(packing.lengths, dim=2), joined, packing.before, strict=True):
        for start in range(0, q.shape[2], RESPONSE_BLOCK if before else q.shape[2]):
            rows, end = slice(start, start + RESPONSE_BLOCK), before + start + RESPONSE_BLOCK
            block = (q[:, :, rows], k[:, :, :end], v[:, :, :end]) if before else (q, k, v)
            shape = block[0].shape[2], block[1].shape[2], before + start
            # What is computed together is copied together, which only short sequences are worth.
            alone = () if plain and shape[1] <= _SHORT else (len(blocks),)
            alike.setdefault((*shape, *alone), []).append(len(blocks))
            blocks.append(block)
    outputs: dict[int, Tensor] = {}
    for (_, _, before, *_), places in alike.items():
        if len(places) > 1:
            q, k, v = (torch.cat(parts) for parts in zip(*(blocks[place] for place in places), strict=True))
        else:
            q, k, v = blocks[places[0]]
            k, v = (k.contiguous(), v.contiguous()) if before else (k, v)
        outputs |= zip(places, _one(q, k, v, before or None, scores).split(1), strict=True)
    return torch.cat([outputs[place] for place in range(len(blocks))], dim=1)


def in_one_call(dtype: torch.dtype, width: int) -> bool:
    """Whether a GPU can compute the attention of all sequences of a pass in one call, for heads of this width."""
    return dtype == torch.bfloat16 and width % 8 == 0 and width <= _LARGEST_HEAD


def _rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scores: ScoreSettings
) -> Tensor:
    """Does the work of `attend` if every row is a sequence."""
    if not scores.fused(query.shape[2]):
        return _one(query, key, value, None, scores)
    output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scores.scaling)[0]
    return output


def _one(query: Tensor, key: Tensor, value: Tensor, before: int | None, scores: ScoreSettings) -> Tensor:
    """The attention of one sequence, or of rows of the same length. `before` is the number of tokens before it that
    have only keys and values, or None."""
    plain = before is None and scores.fused(key.shape[2])
    return _masked(query, key, value, None if plain else Reach(before or 0, scores.window), scores)


def by_blocks(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: ScoreSettings) -> Tensor:
    """Does the work of `attend` in blocks of padded sequences of similar lengths. A GPU does this if no kernel takes
    all sequences in one call (float16 and float32, bounded scores, sinks)."""
    blocks, order = packing.blocks
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for block in blocks:
        rows, keys, values = (x[at].transpose(1, 2) for x, at in ((q, block.queries), (k, block.keys), (v, block.keys)))
        reach = None
        if block.before is not None or not scores.fused(keys.shape[2]):
            reach = Reach(0 if block.before is None else block.before.view(-1, 1, 1, 1), scores.window)
        if repeats > 1 and scores.softcap is None and scores.sinks is None:
            # Without flash attention, torch's kernel needs as many key heads as query heads.
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        outputs.append(_masked(rows, keys, values, reach, scores).flatten(0, 1))
    return torch.cat(outputs)[order].unsqueeze(0)


def _masked(query: Tensor, key: Tensor, value: Tensor, reach: Reach | None, scores: ScoreSettings) -> Tensor:
    """The output of attention, (B, T, heads, D). `reach` says which keys a query attends to. If it is None, attention
    is causal."""
    if reach is not None and (scores.softcap is not None or scores.sinks is not None):
        scaling = scores.scaling or query.shape[-1] ** -0.5
        return torch.as_tensor(_Unfused.apply(query, key, value, scores.sinks, reach, scaling, scores.softcap))
    grouped = key.shape[1] != query.shape[1]
    mask = None if reach is None else reach.mask(slice(0, query.shape[2]), slice(0, key.shape[2]), query.device)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scores.scaling, enable_gqa=grouped
    ).transpose(1, 2)


@cache
def _shares_keys(function: Callable[..., Any]) -> bool:
    """Whether several query heads may read one key head, which torch allows since 2.12."""
    return "enable_gqa" in inspect.signature(function).parameters


class _Unfused(torch.autograd.Function):
    """Attention with scores that no kernel of torch computes. The scores are computed for some queries at a time, and
    again in the backward pass. So memory does not grow with the square of the length."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, sinks, reach, scaling, softcap = arguments
        ctx.save_for_backward(query, key, value, sinks)
        ctx.settings = reach, scaling, softcap
        parts = []
        for rows, keys in _chunks(query, key, reach):
            mask = reach.mask(rows, keys, query.device)
            near = key[:, :, keys], value[:, :, keys]
            parts.append(_unfused(query[:, :, rows], *near, sinks, mask, scaling, softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        reach, scaling, softcap = ctx.settings
        inputs: list[Any] = list(ctx.saved_tensors)
        wanted = [k for k in range(4) if ctx.needs_input_grad[k]]
        found: list[Any] = [None] * len(ctx.needs_input_grad)
        chunks = _chunks(inputs[0], inputs[1], reach)
        for rows, keys in chunks:
            places = (rows, keys, keys, slice(None))
            used: list[Any] = [
                None if x is None else _part(x, at).detach() for x, at in zip(inputs, places, strict=True)
            ]
            for k in wanted:
                used[k].requires_grad_()
            query, key, value, sinks = used
            with torch.enable_grad():
                mask = reach.mask(rows, keys, query.device)
                output = _unfused(query, key, value, sinks, mask, scaling, softcap)
            parts = torch.autograd.grad(output, [used[k] for k in wanted], gradients[0][:, rows])
            for k, part in zip(wanted, parts, strict=True):
                if len(chunks) == 1:
                    found[k] = part
                    continue
                if found[k] is None:  # gradients of keys and sinks are summed over the chunks
                    found[k] = torch.zeros_like(inputs[k], dtype=torch.float32)
                _part(found[k], places[k]).add_(part)
        for k in wanted:
            found[k] = found[k].to(inputs[k].dtype)
        return tuple(found)


def _part(tensor: Tensor, at: slice) -> Tensor:
    """The positions `at` of queries, keys or values. Sinks are returned whole."""
    return tensor[:, :, at] if tensor.dim() == 4 else tensor


def _chunks(query: Tensor, key: Tensor, reach: Reach) -> list[tuple[slice, slice]]:
    """The queries whose scores are computed together, each with the keys that they may attend to."""
    (count, heads, length, _), there = query.shape, key.shape[2]
    most = SCORE_BYTES // (4 * count * heads)
    step = max(1, most // there)
    if step >= length:
        return [(slice(0, length), slice(0, there))]
    if reach.window is not None and isinstance(reach.before, int):
        # `step` queries attend to fewer than step + window keys.
        step = max(step, (math.isqrt(reach.window**2 + 4 * most) - reach.window) // 2)
    rows = [slice(first, min(length, first + step)) for first in range(0, length, step)]
    return [(each, reach.keys(each, there)) for each in rows]


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """The output of attention, (B, T, heads, D). `mask`, bool, marks the keys that a query attends to. It is (T, keys)
    or (B, 1, T, keys)."""
    repeats = query.shape[1] // key.shape[1]
    longer, values = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    found = query @ longer.transpose(2, 3) * scaling
    if softcap is not None:
        found = torch.tanh(found / softcap) * softcap
    found = found.float().masked_fill(~mask, -torch.inf)
    if sinks is not None:
        found = torch.cat([found, sinks.float().view(1, -1, 1, 1).expand(*found.shape[:3], 1)], -1)
    weights = found.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ values).transpose(1, 2)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None = None,
    joined: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Does the work of `attend` for all sequences in one call. Keys and values of a prefix are repeated for each
    sequence that continues it. `joined`: the keys and values of each sequence, if some continue caches."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = packing.starts, max(packing.lengths)
    key_starts, longest_keys = starts, longest
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if joined is not None:
        k, v = (torch.cat([pair[n] for pair in joined], 2)[0].transpose(0, 1) for n in (0, 1))
        key_starts, longest_keys = packing.key_starts, packing.longest
    elif packing.prefixes is not None:
        index, key_starts = packing.keys
        k, v, longest_keys = k[index], v[index], packing.longest
    # Attention is causal. If there are more keys than queries, their ends are aligned (flash attention since 2.1).
    causal = (-1 if window is None else window - 1, 0)
    options: dict[str, Any] = {"scale": scaling, "window_size": causal}
    if (repeats := q.shape[1] // k.shape[1]) > 1:
        if _shares_keys(varlen_attn):
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    found: Any = varlen_attn(q, k, v, starts, key_starts, longest, longest_keys, **options)
    return torch.as_tensor(found).unsqueeze(0)


AttentionInterface.register(NAME, attend)
