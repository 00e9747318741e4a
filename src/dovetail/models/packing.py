"""Sequences laid end to end, of which some go on from another one: what shares a prefix computes it once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


class Packing:
    """Sequences of `lengths`, one after the other, on `device`.

    `prefixes[i]`: the sequence that sequence i goes on from, or None; it has none itself. Sequence i's positions begin
    where that one's end, and it attends to that one and to itself. Without `prefixes` no sequence has one."""

    # No dataclass: FSDP2 makes a new one of those in every layer, without what is cached.
    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None] | None, device: torch.device) -> None:
        """Raises ValueError for prefixes that cannot be."""
        self.lengths = tuple(lengths)
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
        """Tokens of each sequence's prefix."""
        if self.prefixes is None:
            return (0,) * len(self.lengths)
        return tuple(0 if prefix is None else self.lengths[prefix] for prefix in self.prefixes)

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
        starts = F.pad(torch.tensor([len(part) for part in parts]).cumsum(0), (1, 0))
        return self._moved(torch.cat(parts)), self._moved(starts.to(torch.int32))
