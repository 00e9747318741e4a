"""The routing table of a layout switch. Each byte is sent once. Of its holders, the one that has the least to send
sends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dovetail.protocol.weights.layout import Box, RankGrid, Tensor, overlap, pieces, volume

# Parts smaller than this are not split further to balance the senders, because each message has a cost of its own.
MIN_PIECE_BYTES = 1 << 20


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
