"""Switching layouts: every rank ends up with what it needs, every byte is sent once, and senders share the work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.weights import LayoutError
from dovetail.protocol.weights.layout import Box, StageRanks
from dovetail.protocol.weights.layout import Tensor as StageTensor
from helpers.papers import routing

RankGrid, RoutingTable, Tensor, route = routing.RankGrid, routing.RoutingTable, routing.Tensor, routing.route

Arrays = dict[tuple[int, str], np.ndarray[Any, np.dtype[np.int64]]]


@st.composite
def layouts(draw: st.DrawFn, layers: int) -> RankGrid:
    dp = draw(st.integers(1, 4))
    return RankGrid(
        pp=draw(st.integers(1, min(4, layers))),
        tp=draw(st.integers(1, 4)),
        dp=dp,
        first=draw(st.integers(0, 20)),
        sharded=draw(st.booleans()),
        copies=draw(st.sampled_from([k for k in range(1, dp + 1) if dp % k == 0])),
    )


@st.composite
def switches(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 6))
    tensors = []
    for k in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        tp_dim = draw(st.none() | st.integers(0, len(shape) - 1))
        tensors.append(Tensor(f"t{k}", shape, draw(st.integers(0, layers - 1)), tp_dim, draw(st.sampled_from([2, 4]))))
    return {
        "tensors": tensors,
        "layers": layers,
        "source": draw(layouts(layers)),
        "destination": draw(layouts(layers)),
        "ranks_per_node": draw(st.none() | st.integers(1, 8)),
    }


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


def carry_out(switch: dict[str, Any], table: RoutingTable) -> tuple[Arrays, Arrays]:
    """Move numbers by the table: what destination ranks hold after it, and how often each element was sent."""
    truth = {t.name: np.arange(np.prod(t.shape)).reshape(t.shape) for t in switch["tensors"]}
    held: Arrays = {}
    for tensor in switch["tensors"]:
        for box, ranks in switch["source"].boxes(tensor, switch["layers"]).items():
            for rank in ranks:
                array = held.setdefault((rank, tensor.name), np.full(tensor.shape, -1))
                array[slices(box)] = truth[tensor.name][slices(box)]
    after: Arrays = {}
    count = {(0, name): np.zeros(a.shape, int) for name, a in truth.items()}
    for name, box, rank in table.kept:
        array = after.setdefault((rank, name), np.full(truth[name].shape, -1))
        array[slices(box)] = held[rank, name][slices(box)]
    for t in table.transfers:
        assert t.source not in t.destinations
        data = held[t.source, t.tensor][slices(t.box)]
        assert (data >= 0).all(), "a sender sends what it holds"
        count[0, t.tensor][slices(t.box)] += 1
        for rank in t.destinations:
            array = after.setdefault((rank, t.tensor), np.full(truth[t.tensor].shape, -1))
            assert (array[slices(t.box)] == -1).all(), "nobody gets an element twice"
            array[slices(t.box)] = data
    return after, count


@pytest.mark.slow
@settings(deadline=None)
@given(switches())
def test_every_rank_ends_up_with_its_part_and_every_element_is_sent_at_most_once(switch: dict[str, Any]) -> None:
    table = route(**switch)
    after, count = carry_out(switch, table)
    least = 0
    for tensor in switch["tensors"]:
        truth = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
        lacking = np.zeros(tensor.shape, bool)
        holders = switch["source"].boxes(tensor, switch["layers"])
        for box, ranks in switch["destination"].boxes(tensor, switch["layers"]).items():
            for rank in ranks:
                assert (after[rank, tensor.name][slices(box)] == truth[slices(box)]).all()
                mine = np.zeros(tensor.shape, bool)
                mine[slices(box)] = True
                for held, owners in holders.items():
                    if rank in owners:
                        mine[slices(held)] = False
                lacking |= mine
        assert (count[0, tensor.name] == lacking).all(), "an element is sent once if anybody lacks it, else never"
        least += int(lacking.sum()) * tensor.itemsize
    assert table.bytes == least == sum(table.sent.values())
    assert table == route(**switch)
    for segments in (1, 3):
        cut = table.segments(segments)
        assert [t for segment in cut for t in segment] == list(table.transfers)
        assert len(cut) <= segments


@settings(deadline=None)
@given(switches(), st.integers(1, 4))
def test_a_stage_sends_by_the_table_to_one_receiver_of_whole_tensors(switch: dict[str, Any], tp: int) -> None:
    copies, shards = switch["source"].copies, switch["source"].dp // switch["source"].copies
    tensors = [replace(tensor, layer=0) for tensor in switch["tensors"]]
    source = RankGrid(tp=tp, dp=copies * shards, sharded=True, copies=copies)
    table = route(tensors, 1, source, RankGrid(first=source.ranks.stop))
    ranks = StageRanks(tp, copies * shards, copies)
    found = ranks.shares([StageTensor(t.shape, t.tp_dim, t.itemsize) for t in tensors])
    assert {(tensors[i].name, rank, box) for i, parts in enumerate(found) for rank, box in parts} == {
        (t.tensor, t.source, t.box) for t in table.transfers
    }


@settings(deadline=None)
@given(switches())
def test_no_byte_moves_between_equal_layouts(switch: dict[str, Any]) -> None:
    assert route(**{**switch, "destination": switch["source"]}).transfers == ()


def model(layers: int, hidden: int) -> list[Tensor]:
    tensors = [Tensor("embed", (8 * hidden, hidden), 0, 0)]
    for layer in range(layers):
        tensors.append(Tensor(f"{layer}.up", (4 * hidden, hidden), layer, 0))
        tensors.append(Tensor(f"{layer}.down", (hidden, 4 * hidden), layer, 1))
        tensors.append(Tensor(f"{layer}.norm", (hidden,), layer))
    return [*tensors, Tensor("head", (8 * hidden, hidden), layers - 1, 0)]


def test_puzzles_own_example() -> None:
    """(P, D, T) from (4, 1, 1) to (2, 1, 2): Algorithm 1 sends rank r's layer to both ranks of stage r // 2."""
    tensors = [Tensor(f"w{k}", (4, 6), k, 0) for k in range(4)]
    table = route(tensors, 4, RankGrid(pp=4), RankGrid(pp=2, tp=2))
    for rank in range(4):
        reached = {d for t in table.transfers if t.source == rank for d in t.destinations}
        stayed = {r for name, _, r in table.kept if name == f"w{rank}"}
        assert reached | stayed == {2 * (rank // 2), 2 * (rank // 2) + 1}
    # Of two layers each rank of a stage needs the halves: one quarter of the bytes each stays where it is.
    assert table.bytes == 2 * 4 * 24 // 2


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (RankGrid(pp=2, dp=4), RankGrid(dp=4, tp=2, first=8)),
        (RankGrid(dp=8, sharded=True), RankGrid(dp=2, tp=4, first=8)),
        (RankGrid(pp=4, tp=2, dp=2), RankGrid(tp=8, dp=2, first=16)),
    ],
)
def test_senders_share_the_work(source: RankGrid, destination: RankGrid) -> None:
    tensors = model(16, 1024)
    table = route(tensors, 16, source, destination)
    whole = sum(int(np.prod(t.shape)) * t.itemsize for t in tensors)
    assert table.bytes == whole, "disjoint ranks: everything once"
    by_stage: dict[int, list[int]] = {}
    for rank in source.ranks:
        by_stage.setdefault(source.index(rank)[0], []).append(table.sent[rank])
    for loads in by_stage.values():
        assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_senders_on_the_receivers_node_are_preferred() -> None:
    # Two copies of everything, one a node of four; only the first node's ranks need more.
    tensors, source, destination = model(8, 256), RankGrid(dp=2, tp=4), RankGrid(dp=2, tp=2)
    assert {t.source // 4 for t in route(tensors, 8, source, destination).transfers} == {0, 1}
    assert {t.source // 4 for t in route(tensors, 8, source, destination, ranks_per_node=4).transfers} == {0}


def test_seconds_follow_the_busiest_link() -> None:
    tensors = [Tensor("w", (1000, 500), itemsize=2)]
    table = route(tensors, 1, RankGrid(), RankGrid(dp=2, first=1))
    assert table.bytes == 1_000_000
    assert table.seconds(8, 1e6, 1e5) == pytest.approx(1.0)
    assert table.seconds(1, 1e6, 1e5, latency=0.5) == pytest.approx(10.5)
    assert route(tensors, 1, RankGrid(), RankGrid()).seconds(8, 1e6, 1e5) == 0.0


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(LayoutError, match="must not be less"):
        RankGrid(pp=0)
    with pytest.raises(LayoutError, match="pp 3 needs at least 3 layers, the model has 2; lower pp"):
        route([Tensor("w", (4,))], 2, RankGrid(pp=3), RankGrid())
    with pytest.raises(LayoutError, match="w is of layer 2, but the model has 2"):
        route([Tensor("w", (4,), 2)], 2, RankGrid(), RankGrid())
