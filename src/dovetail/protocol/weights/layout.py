"""Says which part of each tensor a rank of a stage holds, and which part each rank sends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# One half-open interval for each dimension.
Box = tuple[tuple[int, int], ...]
# Parts smaller than this are not split further to balance the senders, because each message has a cost of its own.
MIN_PIECE_BYTES = 1 << 20


class LayoutError(ValueError):
    """A layout cannot hold a model. The message says which numbers do not fit."""


def layer_range(layers: int, rank: int, size: int) -> range:
    """The layers of pipeline stage `rank` of `size`, as the trainer splits them. The early stages get one more layer if
    the division is uneven."""
    if size > layers:
        raise LayoutError(f"pp {size} needs at least {size} layers, the model has {layers}; lower pp")
    base, extra = divmod(layers, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


@dataclass(frozen=True)
class Tensor:
    """A parameter. `tp_dim`: the dimension that tensor-parallel ranks share, or None if each holds all of it.
    `itemsize` is in bytes. `experts`: whether it is of experts that are divided over ranks, along the first
    dimension."""

    shape: tuple[int, ...]
    tp_dim: int | None
    itemsize: int
    experts: bool = False


@dataclass(frozen=True)
class StageRanks:
    """The dp x tp ranks of a stage. tp changes fastest. There are `copies` sets of dp / copies neighbours. The ranks of
    each set share the first dimension of each tensor, or of its tensor-parallel part (FSDP). Uneven parts are like
    torch's chunks. Each has ceil(n / k) entries, and the last ones are shorter or empty. `ep` neighbours among the dp
    ranks divide the experts, and the ranks of a set with the same experts share these."""

    tp: int = 1
    dp: int = 1
    copies: int = 1
    ep: int = 1

    def boxes(self, tensor: Tensor) -> dict[Box, list[int]]:
        """The distinct parts of a tensor, which do not overlap, and the ranks that hold each part."""
        held: dict[Box, list[int]] = {}
        ep = self.ep if tensor.experts else 1
        shards, shares = self.dp // self.copies, max(1, self.dp // self.copies // ep)
        for dp in range(self.dp):
            for tp in range(self.tp):
                box = tuple((0, n) for n in tensor.shape)
                if tensor.tp_dim is not None:
                    box = part_of(box, tensor.tp_dim, tp, self.tp)
                if box:
                    box = part_of(part_of(box, 0, dp % ep, ep), 0, dp % shards // ep, shares)
                if volume(box):
                    held.setdefault(box, []).append(dp * self.tp + tp)
        return held

    def shares(self, tensors: Sequence[Tensor]) -> list[list[tuple[int, Box]]]:
        """Which rank sends which part of each tensor, so that every element is sent once. Of its holders, the one that
        has the least to send so far sends a part. Large parts are divided among their holders. The result is
        deterministic."""
        held = [
            (volume(box) * t.itemsize, i, box, ranks)
            for i, t in enumerate(tensors)
            for box, ranks in self.boxes(t).items()
        ]
        share = sum(size for size, *_ in held) / max(1, len({rank for *_, ranks in held for rank in ranks}))
        found: list[list[tuple[int, Box]]] = [[] for _ in tensors]
        sent: Counter[int] = Counter()
        # The largest part goes first to the least loaded holder. This is the classical way to balance loads on unlike
        # machines.
        for size, index, box, ranks in sorted(held, key=lambda h: (-h[0], h[1], h[2])):
            count = int(min(len(ranks), size // MIN_PIECE_BYTES)) if size > share / 8 else 1
            for piece in pieces(box, count):
                sender = min(ranks, key=lambda rank: (sent[rank], rank))
                sent[sender] += volume(piece) * tensors[index].itemsize
                found[index].append((sender, piece))
        return found


def part_of(box: Box, dim: int, index: int, count: int) -> Box:
    """Part `index` of `count` of a box along a dimension."""
    start, stop = box[dim]
    size = -(-(stop - start) // count)
    begin = min(start + index * size, stop)
    return (*box[:dim], (begin, min(begin + size, stop)), *box[dim + 1 :])


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def pieces(box: Box, count: int) -> list[Box]:
    """At most `count` parts of about equal size along the longest dimension."""
    if count <= 1 or not box:
        return [box]
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    start, stop = box[dim]
    count = min(count, stop - start)
    cuts = [start + (stop - start) * k // count for k in range(count + 1)]
    return [(*box[:dim], cut, *box[dim + 1 :]) for cut in pairwise(cuts)]
