"""Computes log-probabilities of tokens and entropies from logits, for a bounded number of rows at a time.

A float32 copy of the (batch, time, vocabulary) logits would be the largest tensor of a step. Here only a chunk of rows
is in float32 at a time, both in the forward and in the backward pass. Autograd keeps the given logits and two numbers
per row."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.protocol.budgets import LOGPROB_CHUNK_BYTES

# Says what is computed: no entropy, its value, or also its gradient.
Entropy = Literal["none", "value", "gradient"]
# The bytes of a chunk of float32 logits on a CPU. Its cache holds so much. A GPU takes LOGPROB_CHUNK_BYTES, which keep
# it busy.
CPU_CHUNK_BYTES = 2**20


def _rows(logits: Tensor, itemsize: int) -> int:
    limit = CPU_CHUNK_BYTES if logits.device.type == "cpu" else LOGPROB_CHUNK_BYTES
    vocabulary: int = logits.shape[-1]
    return max(1, limit // (itemsize * max(1, vocabulary)))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of computations with logits of `dtype`. It is float64 for float64, and float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _TokenStatistics(torch.autograd.Function):
    """Computes log p_i and the entropy H = -sum_j p_j log p_j, for each row x of logits / temperature and its token i.

    The gradients are d log p_i / d x_j = [i = j] - p_j and d H / d x_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, wanted: Entropy) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(logits.dtype)
        logprobs = torch.empty(len(tokens), dtype=wide, device=logits.device)
        entropy = torch.zeros_like(logprobs)
        step = _rows(logits, wide.itemsize)
        for start in range(0, len(tokens), step):
            part = slice(start, start + step)
            logp = torch.log_softmax(_scaled(logits[part], temperature), dim=-1, dtype=wide)
            logprobs[part] = logp.gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1)
            if wanted != "none":
                entropy[part] = -times_logp(logp.exp(), logp).sum(-1)
        ctx.temperature = temperature
        ctx.with_entropy = wanted == "gradient"
        if ctx.with_entropy:
            ctx.save_for_backward(logits, tokens, entropy)
        else:
            ctx.mark_non_differentiable(entropy)
            ctx.save_for_backward(logits, tokens)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens, *entropies = ctx.saved_tensors
        wide = wide_dtype(logits.dtype)
        grad = torch.empty_like(logits)
        step = _rows(logits, wide.itemsize)
        for start in range(0, len(tokens), step):
            part = slice(start, start + step)
            x = _scaled(logits[part], ctx.temperature)
            g = grad_logprobs[part].unsqueeze(-1) / ctx.temperature
            if ctx.with_entropy:
                (entropy,) = entropies
                logp = torch.log_softmax(x, dim=-1, dtype=wide)
                p = logp.exp()
                u = grad_entropy[part].unsqueeze(-1) / ctx.temperature
                d = -p * g - times_logp(p, logp + entropy[part].unsqueeze(-1)) * u
            else:
                d = torch.softmax(x, dim=-1, dtype=wide).mul_(-g)
            grad[part] = d.scatter_add_(-1, tokens[part].unsqueeze(-1), g)
        return grad, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.to(wide_dtype(logits.dtype)) / temperature


def times_logp(p: Tensor, logp: Tensor) -> Tensor:
    """p * logp. A forbidden token (log p = -inf, p = 0) gives 0 and not nan."""
    return torch.where(p > 0, p * logp, 0.0)


def _statistics(logits: Tensor, tokens: Tensor, temperature: float, wanted: Entropy) -> tuple[Tensor, Tensor]:
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and tokens {tuple(tokens.shape)} do not match")
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _TokenStatistics.apply(flat, tokens.reshape(-1).long(), temperature, wanted)
    return logprobs.reshape(tokens.shape), entropy.reshape(tokens.shape)


def gather_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probability of each of `tokens` under softmax(logits / temperature).

    `logits`: (..., V) of any float dtype. `tokens`: (...) integers, already aligned, so that logits[:, t] predicts
    tokens[:, t]. Returns (...) float32, or float64 for float64 logits. It is differentiable in the logits.
    Raises ValueError if the shapes differ or the temperature is not above 0."""
    return _statistics(logits, tokens, temperature, "none")[0]


def logprobs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, differentiable: bool = True
) -> tuple[Tensor, Tensor]:
    """The result of `gather_logprobs`, and the entropy of each row's distribution in nats, (...), in the same pass.
    Log-probabilities are differentiable. The entropy is differentiable if `differentiable` is set."""
    return _statistics(logits, tokens, temperature, "gradient" if differentiable else "value")


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The entropy of softmax(logits / temperature) in nats, (...) float32, or float64 for float64 logits. `logits`:
    (..., V). It is differentiable."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _statistics(logits, tokens, temperature, "gradient")[1]
