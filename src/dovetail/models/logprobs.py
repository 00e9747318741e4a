"""Log-probabilities and entropies of tokens from logits, a bounded number of rows at a time.

A float32 copy of (batch, time, vocabulary) logits is the largest tensor of a step. Here only a chunk of rows
is ever held in float32, forward and backward; autograd keeps the logits as they came and two numbers per
row."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.protocol.budgets import LOGPROB_CHUNK_BYTES

# Of the entropy: nothing, its value, or also its gradient.
Entropy = Literal["none", "value", "gradient"]
# Of wide logits at a time: on a CPU what stays in its cache, on a GPU enough to fill it.
CPU_CHUNK_BYTES = 2**20


def _rows(logits: Tensor, itemsize: int) -> int:
    limit = CPU_CHUNK_BYTES if logits.device.type == "cpu" else LOGPROB_CHUNK_BYTES
    vocabulary: int = logits.shape[-1]
    return max(1, limit // (itemsize * max(1, vocabulary)))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _TokenStatistics(torch.autograd.Function):
    """Per row x of logits / temperature and its token i: log p_i, and H = -sum_j p_j log p_j.

    d log p_i / d x_j = [i = j] - p_j;  d H / d x_j = -p_j (log p_j + H)."""

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
    """p * logp, where a forbidden token (log p = -inf, p = 0) gives 0, not nan."""
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
    """Log-probability of `tokens` under softmax(logits / temperature).

    logits (..., V) of any float dtype; tokens (...) integer, already aligned (logits[:, t] predicts tokens[:,
    t]). Returns (...) in float32 (float64 for float64 logits). Differentiable in the logits.
    Raises ValueError when shapes differ or temperature is not positive."""
    return _statistics(logits, tokens, temperature, "none")[0]


def logprobs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, differentiable: bool = True
) -> tuple[Tensor, Tensor]:
    """`gather_logprobs`, and the entropy in nats of each row's distribution, (...), in the same pass; both
    differentiable, the entropy only if `differentiable`."""
    return _statistics(logits, tokens, temperature, "gradient" if differentiable else "value")


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) -> (...), float32."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _statistics(logits, tokens, temperature, "gradient")[1]
