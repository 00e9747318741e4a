"""Log-probabilities and entropies of tokens from logits, a bounded number of rows at a time.

A float32 copy of (batch, time, vocabulary) logits is the largest tensor of a step. Here only a chunk of rows
is ever held in float32, forward and backward; autograd keeps the logits as they came and two numbers per
row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20


def _rows(vocabulary: int, itemsize: int) -> int:
    return max(1, CHUNK_BYTES // (itemsize * max(1, vocabulary)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _TokenStatistics(torch.autograd.Function):
    """Per row x of logits/temperature and its token i: log p_i = x_i - lse(x), and H = lse(x) - sum_j p_j
    x_j.

    d log p_i / d x_j = [i = j] - p_j;  d H / d x_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(logits.dtype)
        count, vocabulary = logits.shape
        logprobs = torch.empty(count, dtype=wide, device=logits.device)
        lse = torch.empty_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        step = _rows(vocabulary, wide.itemsize)
        for start in range(0, count, step):
            part = slice(start, start + step)
            x = logits[part].to(wide)
            if temperature != 1.0:
                x = x / temperature
            z = torch.logsumexp(x, dim=-1)
            lse[part] = z
            logprobs[part] = x.gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1) - z
            if with_entropy:
                # xlogy-like: a logit of -inf has p = 0 and contributes 0, not nan
                logp = x - z.unsqueeze(-1)
                p = logp.exp()
                entropy[part] = -torch.where(p > 0, p * logp, 0.0).sum(-1)
        ctx.save_for_backward(logits, tokens, lse, entropy)
        ctx.temperature = temperature
        ctx.with_entropy = with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens, lse, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        step = _rows(logits.shape[-1], lse.element_size())
        for start in range(0, logits.shape[0], step):
            part = slice(start, start + step)
            logp = logits[part].to(lse.dtype) / ctx.temperature - lse[part].unsqueeze(-1)
            p = logp.exp()
            g = grad_logprobs[part].unsqueeze(-1)
            d = -p * g
            d.scatter_add_(-1, tokens[part].unsqueeze(-1), g)
            if ctx.with_entropy:
                slope = torch.where(p > 0, p * (logp + entropy[part].unsqueeze(-1)), 0.0)
                d -= slope * grad_entropy[part].unsqueeze(-1)
            grad[part] = (d / ctx.temperature).to(grad.dtype)
        return grad, None, None, None


def _statistics(logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and tokens {tuple(tokens.shape)} do not match")
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _TokenStatistics.apply(flat, tokens.reshape(-1).long(), temperature, with_entropy)
    return logprobs.reshape(tokens.shape), entropy.reshape(tokens.shape)


def gather_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of `tokens` under softmax(logits / temperature).

    logits (..., V) of any float dtype; tokens (...) integer, already aligned (logits[:, t] predicts tokens[:,
    t]). Returns (...) in float32 (float64 for float64 logits). Differentiable in the logits.
    Raises ValueError when shapes differ or temperature is not positive."""
    return _statistics(logits, tokens, temperature, False)[0]


def logprobs_and_entropy(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`gather_logprobs`, and the entropy in nats of each row's distribution, (...); both differentiable."""
    return _statistics(logits, tokens, temperature, True)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) -> (...), float32."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _statistics(logits, tokens, temperature, True)[1]
