"""Triton kernels for logits on a GPU. They compute the sums of a row in one pass over it, and the gradient of a chunk
of logits in place. Import this module only on a machine that runs Triton.

x is a matrix of logits (n, V), and y = bounded(x) / temperature, where bounded(x) is x, or tanh(x / bound) * bound. All
sums are in float32, and their order does not depend on timing, so the same logits give the same bits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_TOKENS = 256


@triton.jit
def _scaled(x, temperature, bound, is_bounded: tl.constexpr):
    if is_bounded:
        x = _bounded(x, bound)
    return x / temperature


@triton.jit
def _bounded(x, bound):
    # tanh(z) = 2 sigmoid(2 z) - 1
    return (2.0 * tl.sigmoid(2.0 * x / bound) - 1.0) * bound


@triton.jit
def _row_sums_kernel(
    logits,
    stride,
    columns,
    temperature,
    bound,
    top_out,
    total_out,
    mean_out,
    is_bounded: tl.constexpr,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mean = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, block):
        place = start + tl.arange(0, block)
        inside = place < columns
        y = tl.load(logits + row * stride + place, mask=inside, other=0.0).to(tl.float32)
        y = tl.where(inside, _scaled(y, temperature, bound, is_bounded), float("-inf"))
        higher = tl.maximum(top, tl.max(y, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        odds = tl.exp(y - shift)
        before = tl.exp(top - shift)
        if with_entropy:
            # The terms so far are relative to a lower top. Before the first term, `top - shift` is -inf, and the sums
            # are zeros.
            moved = tl.where(total > 0, mean + (top - shift) * total, 0.0)
            mean = moved * before + tl.sum(tl.where(odds > 0, odds * (y - shift), 0.0), 0)
        total = total * before + tl.sum(odds, 0)
        top = higher
    tl.store(top_out + row, top)
    tl.store(total_out + row, total)
    tl.store(mean_out + row, mean)


@triton.jit
def _values_kernel(
    logits,
    stride,
    rows,
    place,
    count,
    temperature,
    bound,
    out,
    is_bounded: tl.constexpr,
    block: tl.constexpr,
):
    number = tl.program_id(0) * block + tl.arange(0, block)
    inside = number < count
    row = tl.load(rows + number, mask=inside, other=0)
    column = tl.load(place + number, mask=inside, other=0)
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + number, _scaled(x, temperature, bound, is_bounded), mask=inside)


@triton.jit
def _gradient_kernel(
    logits,
    stride,
    columns,
    temperature,
    bound,
    normaliser,
    entropy,
    place,
    of_logprob,
    of_entropy,
    is_bounded: tl.constexpr,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    at = logits + row * stride + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(of_logprob + row)
    logp = _scaled(x, temperature, bound, is_bounded) - tl.load(normaliser + row)
    p = tl.exp(logp)
    d = tl.where(column == tl.load(place + row), g, 0.0) - p * g
    if with_entropy:
        d -= tl.where(p > 0, p * (logp + tl.load(entropy + row)), 0.0) * tl.load(of_entropy + row)
    if is_bounded:
        share = _bounded(x, bound) / bound
        d *= 1.0 - share * share
    tl.store(at, d.to(logits.dtype.element_ty), mask=inside)


def row_sums(
    logits: Tensor, temperature: float, bound: float | None, entropy: bool, top: Tensor, total: Tensor, mean: Tensor
) -> None:
    """Write three numbers of each row, (n,) float32 each. `top` is the largest y. `total` is the sum of exp(y - top).
    With `entropy`, `mean` is the sum of exp(y - top) (y - top), and 0 otherwise. `logits` (n, V): float16, bfloat16 or
    float32, contiguous rows."""
    count, columns = logits.shape
    if count == 0:
        return
    with _on(logits):
        _row_sums_kernel[(count,)](
            logits,
            logits.stride(0),
            columns,
            temperature,
            bound or 1.0,
            top,
            total,
            mean,
            is_bounded=bound is not None,
            with_entropy=entropy,
            block=_BLOCK,
            num_warps=8,
        )


def values_at(
    logits: Tensor, rows: Tensor, place: Tensor, temperature: float, bound: float | None, out: Tensor
) -> None:
    """Write y at the row and column of each of m tokens. `rows` and `place`: (m,) int64, inside of `logits` (n, V).
    `out`: (m,) float32."""
    if len(rows) == 0:
        return
    with _on(logits):
        _values_kernel[(triton.cdiv(len(rows), _TOKENS),)](
            logits,
            logits.stride(0),
            rows,
            place,
            len(rows),
            temperature,
            bound or 1.0,
            out,
            is_bounded=bound is not None,
            block=_TOKENS,
        )


def gradient_in_place(
    logits: Tensor,
    temperature: float,
    bound: float | None,
    normaliser: Tensor,
    entropy: Tensor | None,
    place: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
) -> None:
    """Replace `logits` (n, columns) by their gradient g ([column is place] - p) - u p (log p + H), times the bound's
    own derivative.

    `normaliser` (n,): log sum exp(y) over the whole vocabulary. `place` (n,) int64: the column of each row's token. It
    may lie outside of the columns. g and u: `of_logprob` and `of_entropy`, (n,) each, divided by the temperature.
    `entropy` (n,): H. Without it the term of u is left out. All but `place` are float32 and contiguous."""
    count, columns = logits.shape
    if count == 0:
        return
    with _on(logits):
        _gradient_kernel[(count, triton.cdiv(columns, _BLOCK))](
            logits,
            logits.stride(0),
            columns,
            temperature,
            bound or 1.0,
            normaliser,
            normaliser if entropy is None else entropy,
            place,
            of_logprob,
            of_entropy,
            is_bounded=bound is not None,
            with_entropy=entropy is not None,
            block=_BLOCK,
            num_warps=8,
        )


def _on(tensor: Tensor) -> Any:
    """A context in which Triton launches on the tensor's GPU. A scorer's stages are on several."""
    return torch.cuda.device_of(tensor)


def runs_on(device: torch.device) -> bool:
    """Whether Triton compiles for this GPU. It needs compute capability 7.5."""
    return bool(torch.cuda.get_device_capability(device) >= (7, 5))
