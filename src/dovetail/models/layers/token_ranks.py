"""Divides the tokens of a pass over context-parallel ranks (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509).
Each rank computes the layers for some of the tokens. For attention the ranks exchange them, so that each has all
tokens of some of the heads. So attention knows nothing of the division."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TokenRanks:
    """The ranks of `group`, which have the same passes. Rank `rank` of `size` computes the tokens `own` of a pass.
    Without a group it is one rank, which computes all."""

    # This is no dataclass, because FSDP2 copies dataclasses in every layer.
    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def counts(self, total: int) -> list[int]:
        """The number of tokens of each rank, of `total` tokens. They differ by at most one."""
        return [(total + rank) // self.size for rank in range(self.size)]

    def own(self, total: int) -> slice:
        """The tokens of this rank."""
        start = sum(self.counts(total)[: self.rank])
        return slice(start, start + self.counts(total)[self.rank])

    def to_heads(self, values: Tensor, total: int) -> Tensor:
        """From all heads of the own tokens, (1, heads, own, D), to all tokens of the own heads, (1, n, total, D). Fewer
        heads than ranks are repeated."""
        if values.shape[1] < self.size:
            values = values.repeat_interleave(self.size // values.shape[1], dim=1)
        return torch.as_tensor(_Exchange.apply(values, self, total, True))

    def to_tokens(self, values: Tensor) -> Tensor:
        """The reverse of `to_heads`, from (1, n, total, D) to (1, heads, own, D)."""
        return torch.as_tensor(_Exchange.apply(values, self, values.shape[2], False))

    def joined(self, part: Tensor, at: slice, count: int) -> Tensor:
        """The parts of all ranks, (count, ...), from this rank's part `at` of them. Every rank must compute the same
        from the whole. So the gradient of a part is this rank's own."""
        return torch.as_tensor(_Joined.apply(part, self.group, at, count))


# The one rank that computes all tokens.
ALONE = TokenRanks()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: TokenRanks, total: int, heads: bool) -> Tensor:
        ctx.arguments = ranks, total, heads
        (_, count, _, width), tokens = values.shape, ranks.counts(total)
        many, few = count // (ranks.size if heads else 1) * width, tokens[ranks.rank]
        mine, theirs = [many * few] * ranks.size, [many * each for each in tokens]
        if heads:
            sent = values[0].reshape(-1)
        else:
            sent = torch.cat([part.reshape(-1) for part in values[0].split(tokens, dim=1)])
            mine, theirs = theirs, mine
        got = values.new_empty(sum(theirs))
        dist.all_to_all_single(got, sent, theirs, mine, group=ranks.group)
        if not heads:
            return got.view(1, ranks.size * count, few, width)
        parts = zip(got.split(theirs), tokens, strict=True)
        return torch.cat([part.view(count // ranks.size, each, width) for part, each in parts], dim=1).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ranks, total, heads = ctx.arguments
        return _Exchange.apply(gradient, ranks, total, not heads), None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, at: slice, count: int) -> Tensor:
        ctx.at = at
        # Each place has one rank's number and zeros of the others, so the sum is exact.
        whole = part.new_zeros(count, *part.shape[1:])
        whole[at] = part
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient[ctx.at], None, None, None
