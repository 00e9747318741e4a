"""Says which part of each tensor a rank of a (pp, tp, dp) layout holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

# One half-open interval for each dimension.
Box = tuple[tuple[int, int], ...]


class LayoutError(ValueError):
    """A layout cannot hold a model. The message says which numbers do not fit."""


@dataclass(frozen=True)
class Tensor:
    """A parameter. `layer`: its transformer layer. The embedding belongs to layer 0, and the head and the last norm
    belong to the last layer. `tp_dim`: the dimension that tensor-parallel ranks share, or None if each holds all of it.
    `itemsize` is in bytes."""

    name: str
    shape: tuple[int, ...]
    layer: int = 0
    tp_dim: int | None = None
    itemsize: int = 2


@dataclass(frozen=True)
class RankGrid:
    """pp x dp x tp ranks from `first` on. tp changes fastest, then dp, as in PUZZLE's Algorithm 1. `sharded`: the dp
    ranks share each tensor's first dimension (FSDP). Without it each holds a copy. With `copies`, there are this many
    sets of dp / copies neighbours, and the ranks of each set share the dimension. Uneven parts are like torch's chunks.
    Each has ceil(n / k) entries, and the last ones are shorter or empty."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    first: int = 0
    sharded: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        if min(self.pp, self.tp, self.dp) < 1 or self.first < 0:
            raise LayoutError(
                f"pp {self.pp}, tp {self.tp}, dp {self.dp} and the first rank {self.first} must not be less"
            )
        if self.copies < 1 or self.dp % self.copies:
            raise LayoutError(f"dp {self.dp} is not a multiple of the {self.copies} copies")

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.pp * self.tp * self.dp)

    def index(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, tp) index of a rank (GETINDEX)."""
        local = rank - self.first
        return local // (self.dp * self.tp), local // self.tp % self.dp, local % self.tp

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """The inverse of `index` (GETRANK)."""
        return self.first + (pp * self.dp + dp) * self.tp + tp

    def boxes(self, tensor: Tensor, layers: int) -> dict[Box, list[int]]:
        """The distinct parts of `tensor`, and the ranks that hold each part, for a model with `layers` layers. The
        parts do not overlap. Raises LayoutError if there are more stages than layers."""
        if not 0 <= tensor.layer < layers:
            raise LayoutError(f"{tensor.name} is of layer {tensor.layer}, but the model has {layers}")
        whole = tuple((0, n) for n in tensor.shape)
        stage = next(p for p in range(self.pp) if tensor.layer in layer_range(layers, p, self.pp))
        held: dict[Box, list[int]] = {}
        shards = self.dp // self.copies
        for dp in range(self.dp):
            for tp in range(self.tp):
                box = whole if tensor.tp_dim is None else _part(whole, tensor.tp_dim, tp, self.tp)
                if self.sharded and box:
                    # FSDP shards the part that tensor parallelism gives to this rank.
                    box = _part(box, 0, dp % shards, shards)
                if volume(box):
                    held.setdefault(box, []).append(self.rank(stage, dp, tp))
        return held


def layer_range(layers: int, rank: int, size: int) -> range:
    """The layers of pipeline stage `rank` of `size`, as the trainer splits them. The early stages get one more layer if
    the division is uneven."""
    if size > layers:
        raise LayoutError(f"pp {size} needs at least {size} layers, the model has {layers}; lower pp")
    base, extra = divmod(layers, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def _part(box: Box, dim: int, index: int, count: int) -> Box:
    start, stop = box[dim]
    size = -(-(stop - start) // count)
    begin = min(start + index * size, stop)
    return (*box[:dim], (begin, min(begin + size, stop)), *box[dim + 1 :])


def overlap(a: Box, b: Box) -> Box | None:
    """The part that two boxes share. None if they share nothing."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


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
