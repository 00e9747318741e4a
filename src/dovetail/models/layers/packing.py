"""Describes sequences that are packed end to end. A sequence may continue another one, so that sequences with the same
prefix compute it once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.models.layers.token_ranks import ALONE, TokenRanks

# On CPUs a scorer's forward pass is padded to a multiple of this many tokens. So are the outputs that are read, and the
# tokens of each expert. Then a float32 matrix product gives a row the same bits, whatever the number of rows and its
# place among them. Attention runs sequence by sequence. So a sample's scores are the same to the last bit, whichever
# other samples are scored with it. Neither inter-stage fusion nor the number of scorers changes a run.
ROWS = 16
# A sequence in a block counts as at least this long. For shorter ones a separate block costs more than padding.
_SHORT = 64


def _sum_in_one_order() -> None:
    """MKL's AVX2 kernels, which it takes on Intel's processors without AVX-512, give a row the same bits only if all of
    them sum in one order. MKL reads the variable before its first product."""
    kernels = torch.backends.cpu.get_cpu_capability(), os.environ.get("MKL_ENABLE_INSTRUCTIONS", "")[:4].upper()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        if "AVX2" in kernels and "GenuineIntel" in file.read(256):
            os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")


_sum_in_one_order()


class Block(NamedTuple):
    """B sequences that are padded to one length. `queries` (B, T) and `keys` (B, K), int64, are the places of the
    tokens of their queries and keys. Padding repeats a sequence's last token. `before` (B,) int64 is the number of
    tokens of each sequence's prefix. If no sequence has a prefix, it is None, and T equals K."""

    queries: Tensor
    keys: Tensor
    before: Tensor | None


class LayerCalls(NamedTuple):
    """Says how layers get the tokens of a pass (1, total, ...). If `places` is None, a layer gets them in one call, as
    they are. Otherwise it is called once for each entry of `places`, (B, T) int64, with rows of these tokens. A row is
    a sequence with its prefix; padding on the right repeats its last token. `order` (total,) int64 is the place of each
    token among those of all rows. `positions`: for each call the positions of its tokens in their sequences.
    `arguments`: what a layer gets besides."""

    positions: list[Tensor]
    arguments: dict[str, Any]
    places: list[Tensor] | None = None
    order: Tensor | None = None

    def spread(self, values: Tensor) -> list[Tensor]:
        """The inputs (B, T, ...) of each call, from those of all tokens (1, total, ...)."""
        return [values] if self.places is None else [values[0, rows] for rows in self.places]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The outputs of all tokens (1, total, ...), from those of each call."""
        if self.places is None:
            return parts[0]
        return torch.cat([part.flatten(0, 1) for part in parts])[self.order].unsqueeze(0)


class KVCache:
    """The keys and values of one sequence's tokens. `layers` maps the number of a layer to two tensors (1, key heads,
    tokens, D)."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


class Past(NamedTuple):
    """The KV cache that a sequence continues. `tokens`: the number of tokens that `cache` holds before the pass. The
    pass adds its own tokens to the cache. If the cache was empty, it also adds those of its prefix."""

    cache: KVCache
    tokens: int


class Packing:
    """Sequences of `lengths` tokens, one after the other, on `device`. Together they have `total` tokens.

    `prefixes[i]`: the sequence that sequence i continues, or None. A prefix has no prefix itself. The positions of
    sequence i begin where its prefix ends, and it attends to its prefix and to itself. Without `prefixes` no sequence
    has one.

    `pasts[i]`: the KV cache that sequence i continues and adds to, or None. A cache that holds tokens replaces a
    prefix. Without `pasts` no sequence has one.

    `ranks` share the tokens. `positions` are then those of this rank's tokens."""

    # This is no dataclass, because FSDP2 copies dataclasses in every layer, without their cached properties.
    def __init__(
        self,
        lengths: Sequence[int],
        prefixes: Sequence[int | None] | None,
        device: torch.device,
        pasts: Sequence[Past | None] | None = None,
        ranks: TokenRanks = ALONE,
    ) -> None:
        """Raises ValueError for impossible prefixes."""
        self.lengths, self.ranks = tuple(lengths), ranks
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
        """The number of tokens of each sequence's prefix or cache."""
        prefixes = self.prefixes or (None,) * len(self.lengths)
        found = [0 if prefix is None else self.lengths[prefix] for prefix in prefixes]
        pasts = self.pasts or (None,) * len(self.lengths)
        return tuple(n if past is None else past.tokens or n for past, n in zip(pasts, found, strict=True))

    @property
    def total(self) -> int:
        """The number of tokens of all sequences, and of all ranks."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, with its prefix or cache."""
        return max(b + n for b, n in zip(self.before, self.lengths, strict=True))

    @cached_property
    def starts(self) -> Tensor:
        """The place where each sequence begins, and the total, (sequences + 1,) int32 on the device."""
        return self._moved(self._starts.to(torch.int32))

    def _moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the device. The host does not wait, because CUDA copies memory that is not page-locked."""
        return tensor.to(self.device, non_blocking=True)

    @cached_property
    def _starts(self) -> Tensor:
        return F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0))

    @property
    def key_starts(self) -> Tensor:
        """The place where the keys of each sequence begin, (sequences + 1,) int32. Its keys are those of its prefix or
        cache, and its own."""
        counts = torch.tensor([b + n for b, n in zip(self.before, self.lengths, strict=True)])
        return self._moved(F.pad(counts.cumsum(0), (1, 0)).to(torch.int32))

    @cached_property
    def positions(self) -> Tensor:
        """The position of each of this rank's tokens in its sequence, prefix or cache included, (own,) int64."""
        sizes, offsets = torch.tensor(self.lengths), torch.tensor(self.before) - self._starts[:-1]
        whole = torch.arange(self.total) + offsets.repeat_interleave(sizes)
        return self._moved(whole[self.ranks.own(self.total)])

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """The tokens that each sequence attends to, sequence after sequence, (n,) int64, and the place where those of
        each sequence begin, (sequences + 1,) int32. They are the tokens of its prefix, and its own."""
        spans = [torch.arange(a, b) for a, b in self._starts.unfold(0, 2, 1).tolist()]
        prefixes = self.prefixes or (None,) * len(spans)
        parts = [s if p is None else torch.cat([spans[p], s]) for p, s in zip(prefixes, spans, strict=True)]
        return self._moved(torch.cat(parts)), self.key_starts

    def packed(self) -> LayerCalls:
        """The layout for layers that know where sequences begin."""
        return LayerCalls([self.positions.unsqueeze(0)], {"packing": self})

    def rows(self, together: bool) -> LayerCalls:
        """The layout for layers that would take packed sequences for one. Sequences are rows of one call if `together`.
        Otherwise each has a call of its own. Raises ValueError if a sequence continues a KV cache."""
        if self.pasts is not None:
            raise ValueError("layers that compute sequences as rows cannot continue a KV cache")
        index, starts = (tensor.cpu() for tensor in self.keys)
        wholes = index.split(starts.diff().tolist())
        groups = [wholes] if together else [[whole] for whole in wholes]
        places: list[Tensor] = []
        order: list[Tensor] = []
        width = 0
        for group in groups:
            longest = max(len(whole) for whole in group)
            rows = torch.stack([torch.cat([whole, whole[-1:].expand(longest - len(whole))]) for whole in group])
            first = len(order)
            for at, (whole, own) in enumerate(zip(group, self.lengths[first:], strict=False)):
                order.append(width + at * longest + torch.arange(len(whole) - own, len(whole)))
            width += rows.numel()
            places.append(self._moved(rows))
        positions = [torch.arange(rows.shape[1], device=self.device).unsqueeze(0) for rows in places]
        return LayerCalls(positions, {}, places, self._moved(torch.cat(order)))

    @cached_property
    def blocks(self) -> tuple[list[Block], Tensor]:
        """The blocks of all sequences, and the place of each token among the queries of all blocks, (total,) int64.
        Padding at most doubles the work of attention."""
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
        # All tensors go to the device in one copy.
        there = self._moved(torch.cat([order, *(tensor.flatten() for tensor in tensors)]))
        parts = there.split([len(order), *(tensor.numel() for tensor in tensors)])
        placed = [part.view(tensor.shape) for part, tensor in zip(parts[1:], tensors, strict=True)]
        found = []
        for number, block in enumerate(members):
            queries, keys, prefixed = placed[3 * number : 3 * number + 3]
            found.append(Block(queries, keys, prefixed if any(before[i] for i in block) else None))
        return found, parts[0]

    def _members(self) -> list[list[int]]:
        """The sequences of each block. Their lengths are similar, and either all or none of them have a prefix."""
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
