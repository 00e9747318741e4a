"""The routing table of a switch from any layout to any other (PUZZLE section 5.2). Each byte is sent once. Of its
holders, the one that has the least to send sends it.

PUZZLE's Algorithm 1 is right only for equal dp and equal pp x tp. Here a layout gives each rank a set of N-dimensional
boxes, and the routing table has the overlaps of these boxes. The product needs the case of one stage and receivers of
whole tensors (`dovetail.protocol.weights.buckets.share_buckets`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dovetail.protocol.weights import LayoutError, layer_range
from dovetail.protocol.weights.layout import MIN_PIECE_BYTES, Box, part_of, pieces, volume


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
                box = whole if tensor.tp_dim is None else part_of(whole, tensor.tp_dim, tp, self.tp)
                if self.sharded and box:
                    # FSDP shards the part that tensor parallelism gives to this rank.
                    box = part_of(box, 0, dp % shards, shards)
                if volume(box):
                    held.setdefault(box, []).append(self.rank(stage, dp, tp))
        return held


def overlap(a: Box, b: Box) -> Box | None:
    """The part that two boxes share. None if they share nothing."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


@dataclass(frozen=True)
class Transfer:
    """`box` of `tensor` goes from rank `source` to all of `destinations`. With one destination it is a send. With
    several it is a broadcast."""

    tensor: str
    box: Box
    source: int
    destinations: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class RoutingTable:
    """`transfers` are in the order of the tensors. `kept`: (tensor, box, rank) for each part that a rank needs and
    already holds."""

    transfers: tuple[Transfer, ...]
    kept: tuple[tuple[str, Box, int], ...]

    @cached_property
    def sent(self) -> Counter[int]:
        """The bytes that each rank sends. A broadcast counts once."""
        sent: Counter[int] = Counter()
        for t in self.transfers:
            sent[t.source] += t.bytes
        return sent

    @cached_property
    def received(self) -> Counter[int]:
        """The bytes that each rank receives."""
        received: Counter[int] = Counter()
        for t in self.transfers:
            for rank in t.destinations:
                received[rank] += t.bytes
        return received

    @property
    def bytes(self) -> int:
        """All bytes that are sent. A broadcast counts once. A table that `route` makes has the fewest possible."""
        return sum(t.bytes for t in self.transfers)

    def seconds(
        self, ranks_per_node: int, node_bandwidth: float, network_bandwidth: float, latency: float = 0.0
    ) -> float:
        """The seconds of the switch if the links are the limit. They are those of the busiest rank's sends, receipts
        and messages. The arguments are bytes per second of one rank in one direction, within a node and between nodes.
        A broadcast leaves its source once, because a chain or tree of receivers passes it on."""
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for t in self.transfers:
            near = all(d // ranks_per_node == t.source // ranks_per_node for d in t.destinations)
            time = latency + t.bytes / (node_bandwidth if near else network_bandwidth)
            out[t.source] += time  # type: ignore[assignment]
            for rank in t.destinations:
                into[rank] += time  # type: ignore[assignment]
        return float(max([*out.values(), *into.values(), 0.0]))

    def segments(self, count: int) -> list[tuple[Transfer, ...]]:
        """The table in `count` segments of about equal bytes. Tensors stay whole and in order. So one segment can be
        sent while the optimizer steps the next (PUZZLE's asynchronous weight transformation)."""
        by_tensor: dict[str, list[Transfer]] = {}
        for t in self.transfers:
            by_tensor.setdefault(t.tensor, []).append(t)
        result: list[list[Transfer]] = [[] for _ in range(count)]
        done, total = 0, max(1, self.bytes)
        for transfers in by_tensor.values():
            result[min(count - 1, done * count // total)] += transfers
            done += sum(t.bytes for t in transfers)
        return [tuple(segment) for segment in result if segment]


def route(
    tensors: Sequence[Tensor],
    layers: int,
    source: RankGrid,
    destination: RankGrid,
    ranks_per_node: int | None = None,
) -> RoutingTable:
    """The routing table of a switch. A rank in both layouts keeps what it holds and needs. Each element leaves its
    holders once, to all ranks that lack it. Of its holders, the one that has the least to send so far sends it. With
    `ranks_per_node`, holders on the receivers' node come first. Large parts are divided among their holders. The result
    is deterministic. Raises LayoutError."""
    kept: list[tuple[str, Box, int]] = []
    cells: list[tuple[int, Tensor, Box, list[int], tuple[int, ...]]] = []
    for order, tensor in enumerate(tensors):
        wanted = destination.boxes(tensor, layers)
        for held_box, holders in source.boxes(tensor, layers).items():
            for box, needing in wanted.items():
                common = overlap(held_box, box)
                if common is None:
                    continue
                owned = set(holders)
                kept += [(tensor.name, common, rank) for rank in needing if rank in owned]
                missing = tuple(rank for rank in needing if rank not in owned)
                if missing:
                    cells.append((order, tensor, common, holders, missing))
    share = sum(volume(c[2]) * c[1].itemsize for c in cells) / max(1, len({r for c in cells for r in c[3]}))
    found: list[tuple[int, Transfer]] = []
    sent: Counter[int] = Counter()
    # The largest transfer goes first to the least loaded holder. This is the classical way to balance loads on unlike
    # machines.
    for order, tensor, box, holders, missing in sorted(
        cells, key=lambda c: (-volume(c[2]) * c[1].itemsize, c[0], c[2])
    ):
        near = [h for h in holders if ranks_per_node and _near(h, missing, ranks_per_node)] or holders
        size = volume(box) * tensor.itemsize
        wanted_pieces = int(min(len(near), size // MIN_PIECE_BYTES)) if size > share / 8 else 1
        for piece in pieces(box, wanted_pieces):
            sender = min(near, key=lambda r: (sent[r], r))
            amount = volume(piece) * tensor.itemsize
            sent[sender] += amount
            found.append((order, Transfer(tensor.name, piece, sender, missing, amount)))
    found.sort(key=lambda f: (f[0], f[1].box, f[1].source))
    return RoutingTable(tuple(t for _, t in found), tuple(kept))


def _near(rank: int, others: Sequence[int], ranks_per_node: int) -> bool:
    return all(rank // ranks_per_node == other // ranks_per_node for other in others)
