"""Sequences laid end to end, of which some go on from another one: what shares a prefix computes it once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# A sequence in a block counts as at least this long: below it a block of its own costs more than padding.
_SHORT = 64
# On CPUs attention takes the tokens that go on from a prefix or a cache in blocks of so many, counted from the end of
# the prompt. So it computes the same bits for a response that comes in parts, if each part but the last one ends where
# a block ends.
RESPONSE_BLOCK = 64


class Block(NamedTuple):
    """Sequences padded to one length, of B sequences: the tokens of their queries (B, T) int64 and of their keys (B, K)
    int64. Padding repeats a sequence's last token. `before` (B,) int64: tokens of each one's prefix; None if none has
    one, and then T is K."""

    queries: Tensor
    keys: Tensor
    before: Tensor | None


class KVCache:
    """Keys and values of one sequence's tokens, each (1, key heads, tokens, D), by the number of the layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


class Past(NamedTuple):
    """What a sequence goes on from: the `tokens` that `cache` holds before the pass. The pass adds its own to it, and,
    if there were none, those of its prefix."""

    cache: KVCache
    tokens: int


class Packing:
    """Sequences of `lengths`, one after the other, on `device`.

    `prefixes[i]`: the sequence that sequence i goes on from, or None; it has none itself. Sequence i's positions begin
    where that one's end, and it attends to that one and to itself. Without `prefixes` no sequence has one.

    `pasts[i]`: the cache that sequence i goes on from, and adds to, or None. One that holds tokens takes the place of a
    prefix. Without `pasts` no sequence has one."""

    # No dataclass: FSDP2 makes a new one of those in every layer, without what is cached.
    def __init__(
        self,
        lengths: Sequence[int],
        prefixes: Sequence[int | None] | None,
        device: torch.device,
        pasts: Sequence[Past | None] | None = None,
    ) -> None:
        """Raises ValueError for prefixes that cannot be."""
        self.lengths = tuple(lengths)
        self.pasts = None if pasts is None or not any(pasts) else tuple(pasts)
        self.prefixes = None if prefixes is None else tuple(prefixes)
        self.device = device
        if self.prefixes is not None:
            if len(self.prefixes) != len(lengths):
                raise ValueError(
                    f"{len(self.prefixes)} prefixes for {len(lengths)} sequences; give one (or None) a sequence"
                )
            for i, prefix in enumerate(self.prefixes):
                if prefix is not None and not (0 <= prefix < len(lengths) and self.prefixes[prefix] is None):
                    raise ValueError(
                        f"sequence {i} goes on from {prefix}, which is none, or goes on from another itself"
                    )

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Tokens of each sequence's prefix, or of its cache."""
        prefixes = self.prefixes or (None,) * len(self.lengths)
        found = [0 if prefix is None else self.lengths[prefix] for prefix in prefixes]
        pasts = self.pasts or (None,) * len(self.lengths)
        return tuple(n if past is None else past.tokens or n for past, n in zip(pasts, found, strict=True))

    @property
    def longest(self) -> int:
        """Of the sequences, each with its prefix, tokens."""
        return max(b + n for b, n in zip(self.before, self.lengths, strict=True))

    @cached_property
    def starts(self) -> Tensor:
        """(sequences + 1,) int32."""
        return self._moved(self._starts.to(torch.int32))

    def _moved(self, tensor: Tensor) -> Tensor:
        """On the device. The host does not wait for it: CUDA takes a copy of what is not page-locked."""
        return tensor.to(self.device, non_blocking=True)

    @cached_property
    def _starts(self) -> Tensor:
        return F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0))

    @property
    def key_starts(self) -> Tensor:
        """Where each sequence's keys begin, its prefix's or cache's and its own, (sequences + 1,) int32."""
        counts = torch.tensor([b + n for b, n in zip(self.before, self.lengths, strict=True)])
        return self._moved(F.pad(counts.cumsum(0), (1, 0)).to(torch.int32))

    @property
    def positions(self) -> Tensor:
        """Of each token in its sequence with the prefix, (total,) int64."""
        sizes, offsets = torch.tensor(self.lengths), torch.tensor(self.before) - self._starts[:-1]
        return self._moved(torch.arange(int(self._starts[-1])) + offsets.repeat_interleave(sizes))

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """The tokens that each sequence attends to, its prefix's and its own, sequence after sequence, (n,) int64, and
        where each sequence's begin, (sequences + 1,) int32."""
        spans = [torch.arange(a, b) for a, b in self._starts.unfold(0, 2, 1).tolist()]
        prefixes = self.prefixes or (None,) * len(spans)
        parts = [s if p is None else torch.cat([spans[p], s]) for p, s in zip(prefixes, spans, strict=True)]
        return self._moved(torch.cat(parts)), self.key_starts

    @cached_property
    def blocks(self) -> tuple[list[Block], Tensor]:
        """Blocks of all sequences, whose padding at most doubles the work of attention; and where each token is among
        the queries of all blocks, (total,) int64."""
        before, starts = self.before, self._starts.tolist()
        prefixes = self.prefixes or (None,) * len(self.lengths)
        tensors: list[Tensor] = []
        order = torch.empty(starts[-1], dtype=torch.int64)
        total = 0
        members = self._members()
        for block in members:
            longest = max(self.lengths[i] for i in block)
            most = max(self.lengths[i] + before[i] for i in block)
            queries, keys = torch.empty(len(block), longest, dtype=torch.int64), torch.empty(len(block), most).long()
            for row, i in enumerate(block):
                own, prefix = torch.arange(starts[i], starts[i + 1]), prefixes[i]
                whole = own if prefix is None else torch.cat([torch.arange(starts[prefix], starts[prefix + 1]), own])
                for table, span in ((queries, own), (keys, whole)):
                    table[row, : len(span)], table[row, len(span) :] = span, span[-1]
                order[starts[i] : starts[i + 1]] = torch.arange(total, total + len(own))
                total += longest
            tensors += [queries, keys, torch.tensor([before[i] for i in block])]
        # In one copy.
        there = self._moved(torch.cat([order, *(tensor.flatten() for tensor in tensors)]))
        parts = there.split([len(order), *(tensor.numel() for tensor in tensors)])
        placed = [part.view(tensor.shape) for part, tensor in zip(parts[1:], tensors, strict=True)]
        found = []
        for number, block in enumerate(members):
            queries, keys, prefixed = placed[3 * number : 3 * number + 3]
            found.append(Block(queries, keys, prefixed if any(before[i] for i in block) else None))
        return found, parts[0]

    def _members(self) -> list[list[int]]:
        """The sequences of each block: similar ones, and such with a prefix apart from others."""
        sizes = [(b > 0, max(b + n, _SHORT), max(n, _SHORT)) for b, n in zip(self.before, self.lengths, strict=True)]
        members: list[list[int]] = []
        work = longest = most = 0
        for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
            prefixed, keys, queries = sizes[i]
            if members and sizes[members[-1][0]][0] == prefixed:
                padded = (len(members[-1]) + 1) * max(longest, queries) * max(most, keys)
                if padded <= 2 * (work + queries * keys):
                    members[-1].append(i)
                    work, longest, most = work + queries * keys, max(longest, queries), max(most, keys)
                    continue
            members.append([i])
            work, longest, most = queries * keys, queries, keys
        return members
