"""Computes log-probabilities of tokens, and entropies. A last stage returns them in place of logits.

On a GPU logits are the largest tensor of a step. If they are larger than one chunk, they never exist as a whole. The
sums of each row are computed for a chunk of rows at a time. The gradients are computed for a chunk of the vocabulary at
a time, from logits that are computed again. This costs one more product with the vocabulary's weight (2 % of a training
step of a 7B model). Each tensor-parallel rank computes with its own rows of that weight, and the ranks exchange four
numbers for each row. Triton kernels compute the sums and the gradients from logits in the compute dtype
(`vocabulary_kernels`), where Triton runs.

On a CPU the whole logits exist, because memory is cheaper there than the product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dovetail.gpus.kernels import can_compile
from dovetail.models.layers.logprobs import Entropy, gather_logprobs, logprobs_and_entropy, wide_dtype
from dovetail.models.layers.vocabulary import project, rows_of
from dovetail.protocol.budgets import LOGPROB_CHUNK_BYTES

# The bytes of a float32 chunk of logits on a CPU, if several tokens read a row. A CPU's caches hold so much.
_CPU_CHUNK_BYTES = 4 * 2**20
# The columns of a chunk of the vocabulary are a multiple of this, which makes the matrix product fast.
_COLUMNS = 128


class Predicted(NamedTuple):
    """The predictions of `tokens`, (m,) int64, in the order in which they were asked for.

    `logprobs` (m,) are log-probabilities. `entropy` (n,) is that of each wanted position, in nats. It means nothing if
    it was not asked for. All are float32, or float64 for float64 logits."""

    tokens: Tensor
    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Predictions:
    """Says what to compute for `tokens`, (m,) int64.

    Without `rows` there is one token for each of the n wanted positions. With `rows`, (m,) int64 and ascending, token i
    is at the position `rows[i]` among them, and there are no gradients. `temperature` divides the logits. `entropy`
    asks for no entropy, its value, or also its gradient. Raises ValueError unless the temperature is above 0."""

    tokens: Tensor
    temperature: float = 1.0
    entropy: Entropy = "none"
    rows: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")


@dataclass(frozen=True)
class Vocabulary:
    """The projection to logits. `weight` (V, H) is a whole tensor, or a DTensor whose rows tensor-parallel ranks share.
    tanh keeps the logits within `bound`. If it is None, they have no bound."""

    weight: Any
    bound: float | None = None

    @property
    def shared(self) -> bool:
        return hasattr(self.weight, "device_mesh")

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits (..., V) of `hidden` (..., H), in the compute dtype."""
        return _bounded(project(hidden, self.weight), self.bound)


def predict(hidden: Tensor, vocabulary: Vocabulary, asked: Predictions) -> Predicted:
    """The predictions that `asked` asks for, from `hidden` (n, H). They are differentiable in `hidden` and in the
    vocabulary's weight."""
    size = int(vocabulary.weight.shape[0])
    # `by_chunks` needs rows of the weight on every tensor-parallel rank.
    ranks = vocabulary.weight.device_mesh.size() if vocabulary.shared else 1
    small = ranks == 1 and 4 * len(hidden) * size <= LOGPROB_CHUNK_BYTES
    if not hidden.is_cuda or small or size < ranks * ranks:
        return _from_logits(vocabulary.logits(hidden), asked)
    return by_chunks(hidden, vocabulary, asked)


def by_chunks(
    hidden: Tensor, vocabulary: Vocabulary, asked: Predictions, chunk: int = LOGPROB_CHUNK_BYTES
) -> Predicted:
    """Does the same as `predict`, without the whole logits. Logits of about twice `chunk` bytes exist at a time.
    Without kernels these are two float32 tensors, or three with the entropy's gradient."""
    weight, first, group = vocabulary.weight, 0, None
    if vocabulary.shared:
        (first, _), group = rows_of(weight), weight.device_mesh.get_group()
        weight = weight.to_local()
    part = _Part(first, group, vocabulary.bound, chunk)
    if asked.rows is not None or not torch.is_grad_enabled():
        sums = _sums(hidden, weight, asked.tokens, asked.rows, asked.temperature, asked.entropy != "none", part)
        logprobs, entropy = sums.logprobs(asked.rows), sums.entropy
    else:
        logprobs, entropy = _Chunked.apply(hidden, weight, asked.tokens, asked.temperature, asked.entropy, part)
    return Predicted(asked.tokens, logprobs, entropy)


# ------------------------------------------------------------ from whole logits


def _from_logits(logits: Tensor, asked: Predictions) -> Predicted:
    tokens = asked.tokens
    if asked.rows is not None:
        rows = torch.from_numpy(asked.rows).to(logits.device, non_blocking=True)
        logprobs = _of_rows(logits, rows, tokens, asked.temperature)
        return Predicted(tokens, logprobs, logprobs.new_zeros(0))
    if asked.entropy == "none":
        logprobs = gather_logprobs(logits, tokens, asked.temperature)
        entropy = logprobs.new_zeros(0)
    else:
        gradient = asked.entropy == "gradient"
        logprobs, entropy = logprobs_and_entropy(logits, tokens, asked.temperature, gradient)
    return Predicted(tokens, logprobs, entropy)


def _of_rows(logits: Tensor, rows: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The log-probabilities log softmax(logits / temperature) of `tokens`, (m,) float32. `logits`: (n, V). `rows` (m,):
    the row of each token. `tokens`: (m,)."""
    limit = _CPU_CHUNK_BYTES if logits.device.type == "cpu" else LOGPROB_CHUNK_BYTES // 4
    step = max(1, limit // (4 * logits.shape[1]))
    parts = []
    for start in range(0, len(tokens), step):
        x = logits[rows[start : start + step]].float()
        if temperature != 1.0:
            x = x / temperature
        logprobs = torch.log_softmax(x, dim=1)
        parts.append(logprobs.gather(1, tokens[start : start + step, None]).squeeze(1))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


# ------------------------------------------------------------ by chunks


@dataclass(frozen=True)
class _Part:
    """The part of the vocabulary with which this rank computes. `first`: its first row. `group`: the ranks that share
    the vocabulary, or None if this rank has all of it. `bound`: see `Vocabulary`. `chunk`: the size of a chunk in
    bytes."""

    first: int
    group: Any
    bound: float | None
    chunk: int


class _Sums(NamedTuple):
    """Sums over the vocabulary, where y = logits / temperature. `top` (n,): the largest y of each row. `spread` (n,):
    log sum exp(y - top). `at` (m,): the y of each token. `mean` (n,): the expectation of y - top, or zeros if no
    entropy was asked for."""

    top: Tensor
    spread: Tensor
    at: Tensor
    mean: Tensor

    def logprobs(self, rows: NDArray[np.int64] | None) -> Tensor:
        top, spread = self.top, self.spread
        if rows is not None:
            index = torch.from_numpy(rows).to(top.device, non_blocking=True)
            top, spread = top[index], spread[index]
        return (self.at - top) - spread

    @property
    def entropy(self) -> Tensor:
        return self.spread - self.mean


def _kernels(hidden: Tensor) -> Any:
    """The module of the kernels for logits of this dtype and device, or None if torch's own operations compute them."""
    if not hidden.is_cuda or hidden.dtype == torch.float64 or not can_compile():
        return None
    from dovetail.models.layers import vocabulary_kernels

    return vocabulary_kernels if vocabulary_kernels.runs_on(hidden.device) else None


def _in_a_chunk(hidden: Tensor, chunk: int, kernels: Any) -> int:
    """The number of logits of a chunk. Two float32 tensors of them exist at a time, or one in the compute dtype."""
    wide: int = wide_dtype(hidden.dtype).itemsize
    return chunk // wide if kernels is None else 2 * chunk // hidden.dtype.itemsize


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(count, start + step)) for start in range(0, count, step))


def _bounded(logits: Tensor, bound: float | None) -> Tensor:
    return logits if bound is None else torch.tanh(logits / bound) * bound


def _sums(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    rows: NDArray[np.int64] | None,
    temperature: float,
    entropy: bool,
    part: _Part,
) -> _Sums:
    """Computes the sums for a chunk of rows at a time, and then over all ranks that share the vocabulary."""
    count, size = len(hidden), len(weight)
    dtype = wide_dtype(hidden.dtype)
    top, total, mean = (torch.zeros(count, dtype=dtype, device=hidden.device) for _ in range(3))
    at = torch.zeros(len(tokens), dtype=dtype, device=hidden.device)
    here = (tokens >= part.first) & (tokens < part.first + size)
    place = (tokens - part.first).clamp(0, size - 1)
    index = None if rows is None else torch.from_numpy(rows).to(hidden.device, non_blocking=True)
    kernels = _kernels(hidden)
    for chunk in _slices(count, max(1, _in_a_chunk(hidden, part.chunk, kernels) // size)):
        x = F.linear(hidden[chunk], weight)
        begin, end = (chunk.start, chunk.stop) if rows is None else np.searchsorted(rows, [chunk.start, chunk.stop])
        if kernels is not None:
            kernels.row_sums(x, temperature, part.bound, entropy, top[chunk], total[chunk], mean[chunk])
            local = torch.arange(len(x), device=x.device) if index is None else index[begin:end] - chunk.start
            kernels.values_at(x, local, place[begin:end], temperature, part.bound, at[begin:end])
            continue
        y = _bounded(x, part.bound).to(dtype)
        if temperature != 1.0:
            y.div_(temperature)
        if index is None:
            at[chunk] = y.gather(1, place[chunk, None]).squeeze(1)
        else:
            at[begin:end] = y[index[begin:end] - chunk.start, place[begin:end]]
        top[chunk] = y.amax(1)
        y.sub_(top[chunk, None])
        odds = y.exp() if entropy else y.exp_()
        total[chunk] = odds.sum(1)
        if entropy:
            mean[chunk] = odds.mul_(y).sum(1)
    at = at.masked_fill(~here, 0.0)
    if part.group is not None:
        top, total, mean, at = _over_ranks(top, total, mean, at, part.group)
    return _Sums(top, total.log(), at, mean / total)


def _over_ranks(top: Tensor, total: Tensor, mean: Tensor, at: Tensor, group: Any) -> tuple[Tensor, ...]:
    """The sums over the whole vocabulary, from those over each rank's part. `mean` is not yet divided by `total`."""
    mine = torch.cat([top, total, mean, at])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    count = len(top)
    tops, totals, means, ats = torch.stack(every).split([count, count, count, len(at)], dim=1)
    top = tops.amax(0)
    above = tops - top
    odds = above.exp()
    return top, (totals * odds).sum(0), (odds * (means + above * totals)).sum(0), ats.sum(0)


# The gradients that the running backward pass wants. Autograd asks for all gradients of a function, even if a split
# backward wants some of them now and the others later.
_wanted = {"hidden": True, "weight": True}


@contextmanager
def gradients_of(half: Literal["inputs", "weights"]) -> Iterator[None]:
    """A context for one half of a split backward. Within it the head computes only the gradient of this half. The other
    half asks again. Only the thread that runs a rank's schedule may enter it. Other threads may run autograd's nodes
    for it meanwhile."""
    before = dict(_wanted)
    _wanted.update(hidden=half == "inputs", weight=half == "weights")
    try:
        yield
    finally:
        _wanted.update(before)


class _Chunked(torch.autograd.Function):
    """Computes log-probabilities of tokens and entropies, (n,) each, from y = x / temperature with x = hidden @
    weight.T.

    Let g and u be the gradients of the two results. Then
    d/dy_j = g ([token is j] - p_j) - u p_j (log p_j + entropy)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        temperature, wanted, part = more
        sums = _sums(hidden, weight, tokens, None, temperature, wanted != "none", part)
        logprobs, entropy = sums.logprobs(None), sums.entropy
        ctx.more = more
        ctx.save_for_backward(hidden, weight, tokens, sums.top + sums.spread, entropy)
        if wanted != "gradient":
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, normaliser, entropy = ctx.saved_tensors
        temperature, wanted, part = ctx.more
        dtype = normaliser.dtype
        g, u = (each[:, None] / temperature for each in gradients)
        size, count = len(weight), max(1, len(hidden))
        kernels = _kernels(hidden)
        # With kernels, a chunk's logits and their product with the weight take no more memory than the logits of the
        # forward pass.
        beside = 0 if kernels is None else hidden.numel()
        step = max(1, (_in_a_chunk(hidden, part.chunk, kernels) - beside) // count // _COLUMNS) * _COLUMNS

        def of_logits(chunk: slice) -> Tensor:
            """The gradient of a chunk of the vocabulary, (n, columns) in the compute dtype."""
            x = F.linear(hidden, weight[chunk])
            place = tokens - (part.first + chunk.start)
            if kernels is not None:
                h = entropy if wanted == "gradient" else None
                kernels.gradient_in_place(x, temperature, part.bound, normaliser, h, place, g.flatten(), u.flatten())
                return x
            x = _bounded(x, part.bound)
            logp = x.to(dtype, copy=True)
            if temperature != 1.0:
                logp.div_(temperature)
            logp.sub_(normaliser[:, None])
            if wanted == "gradient":
                p = logp.exp()
                d = logp.add_(entropy[:, None]).mul_(p).mul_(-u).sub_(p.mul_(g))
            else:
                d = logp.exp_().mul_(-g)
            columns = chunk.stop - chunk.start
            here = (place >= 0) & (place < columns)
            d.scatter_add_(1, place.clamp(0, columns - 1)[:, None], g * here[:, None])
            if part.bound is not None:
                d.mul_(1 - (x.to(dtype) / part.bound).square())
            return d.to(hidden.dtype)

        # Partial products are added up in float32.
        of_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if _wanted["hidden"] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] and _wanted["weight"] else None
        for chunk in _slices(size, step):
            d = of_logits(chunk)
            if of_hidden is not None:
                of_hidden += d @ weight[chunk]
            if of_weight is not None:
                torch.mm(d.t(), hidden, out=of_weight[chunk])
            del d
        if of_hidden is not None:
            of_hidden = of_hidden.to(hidden.dtype)
            if part.group is not None:
                dist.all_reduce(of_hidden, group=part.group)
        return of_hidden, of_weight, None, None, None, None
