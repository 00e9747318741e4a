"""Weights from several senders to several receivers over real Gloo communicators, in one process's threads."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dovetail.trainer.weight_sender as sending
from dovetail.coordinator.workers.offers import receive_for
from dovetail.models.links import rendezvous
from dovetail.models.links.deadline import Deadline, TransferError
from dovetail.models.transfer import Part, call, checksum
from dovetail.protocol.messages import Offer, Publish, Receive, Receiver, SendOn
from dovetail.protocol.weights.buckets import bucket_specs
from dovetail.protocol.weights.layout import StageRanks, Tensor
from dovetail.rollout import peer_sender
from dovetail.rollout.peer_sender import PeerSender
from dovetail.rollout.received_copy import ReceivedCopy
from dovetail.rollout.weight_receiver import WeightReceiver
from dovetail.trainer.weight_sender import WeightParts, WeightSender
from helpers.free_ports import free_port
from helpers.patience import PATIENCE


class World:
    """Trainer ranks as threads, with the collectives that a sender uses."""

    def __init__(self, placement: list[dict[str, tuple[int, ...]]]):
        """`placement[rank][model]` is (pp_rank, dp_rank), or with its tp_rank."""
        self.size = len(placement)
        self.slots: list[Any] = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=PATIENCE)
        self.offers: list[Offer] = []
        self.offered = threading.Event()
        self.senders = [
            WeightSender(_Rank(self, rank, models), self.post, host="127.0.0.1", bucket_bytes=4096)  # type: ignore[arg-type]
            for rank, models in enumerate(placement)
        ]

    def post(self, offer: Offer) -> None:
        self.offers.append(offer)
        self.offered.set()


class _Rank:
    device = torch.device("cpu")

    def __init__(self, world: World, rank: int, models: dict[str, tuple[int, ...]]):
        self.world, self.rank, self.world_size = world, rank, world.size
        self.model = {
            m: SimpleNamespace(pp_rank=place[0], dp_rank=place[1], tp_rank=(*place, 0)[2])
            for m, place in models.items()
        }

    def broadcast_json(self, value: Any) -> Any:
        if self.rank == 0:
            self.world.slots[0] = value
        self.world.barrier.wait()
        value = self.world.slots[0]
        self.world.barrier.wait()
        return value

    def gather_json(self, value: Any) -> list[Any] | None:
        self.world.slots[self.rank] = value
        self.world.barrier.wait()
        out = list(self.world.slots) if self.rank == 0 else None
        self.world.barrier.wait()
        return out


def stage(seed: int, layers: range) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    named = {}
    for n in layers:
        named[f"model.layers.{n}.attn.q.weight"] = torch.randn(17, 13, generator=generator)
        named[f"model.layers.{n}.attn.k.bias"] = torch.randn(5, generator=generator).bfloat16()
        named[f"model.layers.{n}.norm"] = torch.tensor(float(n))
        named[f"model.layers.{n}.empty"] = torch.empty(0, 3)
    return named


RECEIVERS = [
    Receiver(name="rollout-0", kind="rollout", models=["actor"], rank_offset=1),
    Receiver(name="rollout-1", kind="rollout", models=["actor"], rank_offset=2),
    Receiver(name="scorer-0", kind="scorer", models=["critic"], rank_offset=1),
]


def run(
    world: World,
    weights: list[dict[str, Any]],
    receivers: dict[str, Callable[[Offer, Receiver], Any]],
    *,
    epoch: int,
    version: int = 1,
    seconds: float = PATIENCE,
    who: list[Receiver] = RECEIVERS,
) -> tuple[list[Any], dict[str, Any]]:
    """Results or exceptions of every sender rank and every receiver."""
    command = Publish(id="x", version=version, epoch=epoch, receivers=who, deadline_seconds=seconds)
    world.offered.clear()
    with ThreadPoolExecutor(16) as pool:
        sends = [pool.submit(s.publish, command, w) for s, w in zip(world.senders, weights, strict=True)]
        assert world.offered.wait(PATIENCE)
        offer = world.offers[-1]
        takes = {r.name: pool.submit(receivers[r.name], offer, r) for r in who if r.name in receivers}
        return [f.exception() or f.result() for f in sends], {n: f.exception() or f.result() for n, f in takes.items()}


def taker(receiver: WeightReceiver, who: list[Receiver] = RECEIVERS) -> Callable[[Offer, Receiver], Any]:
    def take(offer: Offer, me: Receiver) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in receiver.receive(receive_for(offer, me, who))}

    return take


def same(got: Any, want: dict[str, torch.Tensor]) -> bool:
    return (
        isinstance(got, dict)
        and set(got) == set(want)
        and all(got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in want.items())
    )


def test_stages_of_two_models_reach_their_receivers_whole() -> None:
    # Fused placement: rank 0 holds the actor's first stage and the critic's last. Rank 2 is a dp peer.
    world = World(
        [{"actor": (0, 0), "critic": (1, 0)}, {"actor": (1, 0), "critic": (0, 0)}, {"actor": (0, 1), "critic": (1, 1)}]
    )
    receivers = {r.name: taker(WeightReceiver()) for r in RECEIVERS}
    for version, seed in ((1, 0), (2, 50)):
        actor = [stage(seed, range(3)), stage(seed + 1, range(3, 7))]
        critic = [stage(seed + 2, range(2)), stage(seed + 3, range(2, 4))]
        iterated = [0, 0, 0]

        def counting(rank: int, named: dict[str, torch.Tensor], iterated: list[int] = iterated) -> Iterator[Any]:
            for item in named.items():
                iterated[rank] += 1
                yield item

        held = [(0, actor[0], critic[1]), (1, actor[1], critic[0]), (2, actor[0], critic[1])]
        weights = [{"actor": partial(counting, k, a), "critic": partial(counting, k, c)} for k, a, c in held]
        sent, taken = run(world, weights, receivers, epoch=1, version=version)
        assert sent[0]["bytes"] > 0
        assert [s["bytes"] for s in sent] == [sent[0]["bytes"]] * 3
        assert same(taken["rollout-0"], actor[0] | actor[1])
        assert same(taken["rollout-1"], actor[0] | actor[1])
        assert same(taken["scorer-0"], critic[0] | critic[1])
        # Iterating is a collective: dp peers go through it equally often.
        assert iterated[0] == iterated[2]
    assert world.offers[0].segments[0].port == world.offers[1].segments[0].port, "communicators are kept"


def split(named: dict[str, torch.Tensor], layout: StageRanks, rank: int) -> list[Part]:
    """What a rank holds of a stage's tensors; of "big" ones tp ranks share the columns, of "one" nothing; ep ranks
    divide "big" ones."""
    found = []
    for name, tensor in named.items():
        tp_dim = None if name.startswith("one") or layout.tp == 1 else int(name.startswith("big"))
        experts = name.startswith("big") and layout.ep > 1
        boxes = layout.boxes(Tensor(tuple(tensor.shape), tp_dim, tensor.itemsize, experts))
        box = next((b for b, ranks in boxes.items() if rank in ranks), tuple((0, 0) for _ in tensor.shape))
        found.append(Part(name, tuple(tensor.shape), box, tensor[tuple(slice(*i) for i in box)], tp_dim, experts))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "copies", "tp", "ep"),
    [
        *((2, 1, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1), (4, 2, 1, 1), (1, 1, 2, 1), (2, 1, 2, 1), (2, 2, 2, 1)),
        *((2, 1, 1, 2), (4, 1, 1, 2), (4, 2, 1, 2), (4, 4, 1, 2)),
    ],
)
def test_ranks_send_what_they_hold_once_and_in_equal_shares(dp: int, copies: int, tp: int, ep: int) -> None:
    layout = StageRanks(tp, dp, copies, ep)
    places = [(p, d, t) for p in range(2) for d in range(dp) for t in range(tp)]
    world = World([{"actor": place} for place in places])
    who = RECEIVERS[:2]
    receivers = {r.name: taker(WeightReceiver(), who) for r in who}
    for version in (1, 2):
        stages = []
        for p in range(2):
            named = {n: t for n, t in stage(9 * version + p, range(4 * p, 4 * p + 4)).items() if t.dim()}
            # Large enough to be split between those that hold copies of it; and one that cannot be shared.
            named[f"big.{p}"] = torch.randn(2200, 1001) * version
            named[f"one.{p}"] = torch.full((1, 3), float(version))
            stages.append(named)
        weights = [{"actor": WeightParts(partial(split, stages[p], layout, d * tp + t), layout)} for p, d, t in places]
        sent, taken = run(world, weights, receivers, epoch=1, version=version, who=who)
        assert isinstance(sent[0], dict), sent[0]
        assert same(taken["rollout-0"], stages[0] | stages[1]), taken["rollout-0"]
        assert same(taken["rollout-1"], stages[0] | stages[1])
    segments = world.offers[-1].segments
    assert sorted((s.index, s.part) for s in segments) == [(p, r) for p in range(2) for r in range(dp * tp)]
    shares = [sum(spec.nbytes for b in s.buckets for spec in bucket_specs(b)) for s in segments]
    assert sum(shares) == sum(t.nbytes for named in stages for t in named.values())
    assert max(shares) <= 1.2 * sum(shares) / len(shares)


def test_ranks_beyond_the_layout_send_nothing() -> None:
    layout = StageRanks()
    world = World([{"actor": (0, 0)}, {"actor": (0, 1)}])
    named = stage(3, range(2))
    weights = [{"actor": WeightParts(partial(map, _held_whole, named.items()), layout)}] * 2
    sent, taken = run(world, weights, {"rollout-0": taker(WeightReceiver(), RECEIVERS[:1])}, epoch=1, who=RECEIVERS[:1])
    assert isinstance(sent[1], dict), sent[1]
    assert same(taken["rollout-0"], named)
    assert len(world.offers[0].segments) == 1


def _held_whole(named: tuple[str, torch.Tensor]) -> Part:
    name, tensor = named
    return Part(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape), tensor)


# ---------------------------------------------------------------- from one server to another


def send_on(copy: ReceivedCopy, version: int, seconds: float = PATIENCE, epoch: int = 100) -> Offer:
    request = SendOn(version=version, epoch=epoch, world_size=2, deadline_seconds=seconds)
    return PeerSender(copy, "127.0.0.1").send(request)


def take(receiver: WeightReceiver, offer: Offer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in receiver.receive(Receive(offer=offer, rank_offset=1, world_size=2))}


def unused(copy: ReceivedCopy) -> bool:
    """Whether nothing is being sent, after two minutes at most."""
    assert copy._whole is not None
    end = time.monotonic() + 120
    while copy._whole.users and time.monotonic() < end:
        time.sleep(0.01)
    return not copy._whole.users


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 1, 1), (2, 2, 2)])
def test_a_server_sends_on_what_it_received_from_any_layout(pp: int, dp: int, tp: int) -> None:
    layout = StageRanks(tp, dp)
    places = [(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)]
    world = World([{"actor": place} for place in places])
    who, copy = RECEIVERS[:1], ReceivedCopy()
    first, late = {"rollout-0": taker(WeightReceiver(copy=copy), who)}, WeightReceiver()
    for version in (1, 2):
        stages = [
            {n: t for n, t in stage(9 * version + p, range(4 * p, 4 * p + 4)).items() if t.dim()} for p in range(pp)
        ]
        weights = [{"actor": WeightParts(partial(split, stages[p], layout, d * tp + t), layout)} for p, d, t in places]
        run(world, weights, first, epoch=1, version=version, who=who)
        got = take(late, send_on(copy, version, epoch=100 + version))
        assert same(got, {n: t for named in stages for n, t in named.items()})
        assert unused(copy)
    with pytest.raises(TransferError, match="holds no copy of version 1"):
        send_on(copy, 1)


@pytest.fixture
def copied() -> tuple[ReceivedCopy, dict[str, torch.Tensor], Callable[[int], dict[str, torch.Tensor]]]:
    """The copy of a server that has received version 1, its tensors, and what lets it receive another version."""
    world, who, copy = World([{"actor": (0, 0)}]), RECEIVERS[:1], ReceivedCopy()
    receiver = {"rollout-0": taker(WeightReceiver(copy=copy), who)}

    def receive(version: int) -> dict[str, torch.Tensor]:
        named = stage(version, range(12))
        _, taken = run(world, [{"actor": lambda: named.items()}], receiver, epoch=1, version=version, who=who)
        assert same(taken["rollout-0"], named)
        return named

    return copy, receive(1), receive


def test_a_version_that_is_being_sent_is_not_overwritten(copied: Any) -> None:
    copy, first, receive = copied
    offer = send_on(copy, 1)
    receive(2)
    assert same(take(WeightReceiver(), offer), first)
    kept = {message.data_ptr() for message in copy._whole.messages}
    receive(3)
    assert {message.data_ptr() for message in copy._whole.messages} == kept, "no more memory with each version"


def test_a_bit_that_changes_in_the_copy_is_noticed_by_the_receiver(copied: Any) -> None:
    copy, _, _ = copied
    copy._whole.messages[1][100] ^= 4
    with pytest.raises(TransferError, match="checksum"):
        take(WeightReceiver(), send_on(copy, 1))


@pytest.mark.slow
def test_a_server_that_stops_midway_is_noticed_by_the_deadline(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, named, _ = copied
    stopped, sent = threading.Event(), itertools.count()

    class Stopping(peer_sender.Channel):
        def broadcast(self, *args: Any) -> Any:
            if next(sent) == 1:
                stopped.wait(PATIENCE)
            return super().broadcast(*args)

    monkeypatch.setattr(peer_sender, "Channel", Stopping)
    late = WeightReceiver()
    with pytest.raises(TransferError, match=r"broke or stalled|deadline"):
        take(late, send_on(copy, 1, seconds=3.0))
    stopped.set()
    monkeypatch.undo()
    assert unused(copy)
    assert same(take(late, send_on(copy, 1, epoch=101)), named)


@pytest.mark.slow
def test_a_sender_whose_receiver_never_comes_ends_with_its_deadline(copied: Any) -> None:
    copy, _, _ = copied
    send_on(copy, 1, seconds=0.5)
    assert copy._whole.users == 1
    assert unused(copy)


def test_plain_iterators_can_be_sent_too() -> None:
    world = World([{"critic": (0, 0)}])
    who = RECEIVERS[2:]
    receiver = {"scorer-0": taker(WeightReceiver(), who)}
    for version in (1, 2):
        named = stage(version, range(4))
        sent, taken = run(world, [{"critic": iter(named.items())}], receiver, epoch=1, version=version, who=who)
        assert isinstance(sent[0], dict), sent[0]
        assert same(taken["scorer-0"], named)


@pytest.mark.parametrize("where", [0, 100, -20, -1])
def test_a_flipped_bit_anywhere_is_noticed_before_the_tensors_are_used(
    where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World([{"critic": (0, 0)}])
    who = RECEIVERS[2:]
    receiver = WeightReceiver()
    good, count = sending.pack_into, itertools.count()

    def corrupt(buffer: torch.Tensor, *args: Any) -> None:
        good(buffer, *args)
        if next(count) == 1:
            buffer[where] ^= 4

    named = stage(1, range(12))
    seen: list[str] = []

    def take(offer: Offer, me: Receiver) -> None:
        for name, _ in receiver.receive(receive_for(offer, me, who)):
            seen.append(name)

    monkeypatch.setattr(sending, "pack_into", corrupt)
    _, taken = run(world, [{"critic": lambda: named.items()}], {"scorer-0": take}, epoch=1, who=who)
    assert isinstance(taken["scorer-0"], TransferError)
    assert "checksum" in str(taken["scorer-0"])
    assert seen == world.offers[-1].segments[0].buckets[0].names
    # The same processes recover with a new epoch.
    monkeypatch.undo()
    _, taken = run(world, [{"critic": lambda: named.items()}], {"scorer-0": taker(receiver, who)}, epoch=2, who=who)
    assert same(taken["scorer-0"], named)


@pytest.mark.slow
def test_absent_receivers_are_named_on_every_rank_and_all_iterate_to_the_end() -> None:
    world = World([{"actor": (0, 0)}, {"actor": (0, 1)}])
    who = RECEIVERS[:2]
    named = stage(1, range(3))
    rounds = [0, 0]

    def source(rank: int) -> Iterator[Any]:
        yield from named.items()
        rounds[rank] += 1

    weights = [{"actor": lambda: source(0)}, {"actor": lambda: source(1)}]
    first = taker(WeightReceiver(), who)
    sent, taken = run(world, weights, {"rollout-0": first}, epoch=1, seconds=2.0, who=who)
    assert all(isinstance(s, TransferError) and "rollout-1" in str(s) for s in sent)
    assert "rollout-0" not in str(sent[0])
    assert isinstance(taken["rollout-0"], TransferError)
    assert rounds[0] == rounds[1]
    second = taker(WeightReceiver(), who)
    sent, taken = run(world, weights, {"rollout-0": first, "rollout-1": second}, epoch=2, who=who)
    assert same(taken["rollout-1"], named)
    assert isinstance(sent[1], dict)


def test_a_publish_that_nobody_waits_for_is_called_off_although_all_ranks_had_met_before() -> None:
    """A coordinator dies as a publish begins: no receiver hears of it. The deadline is far away."""
    world = World([{"actor": (0, 0)}])
    who, actor = RECEIVERS[:1], stage(1, range(3))
    weights = [{"actor": lambda: iter(actor.items())}]
    sent, got = run(world, weights, {"rollout-0": taker(WeightReceiver(), who)}, epoch=5, who=who)
    assert same(got["rollout-0"], actor)
    world.senders[0]._cancelled = lambda: True
    sent, _ = run(world, weights, {}, epoch=5, version=2, seconds=100_000.0, who=who)
    assert isinstance(sent[0], TransferError)
    assert "called off" in str(sent[0])
    assert "rollout-0" in str(sent[0])


def test_a_receiver_that_leaves_midway_fails_the_others_and_a_new_epoch_works() -> None:
    world = World([{"actor": (0, 0)}])
    who = RECEIVERS[:2]
    named = stage(1, range(40))
    stays, leaves = WeightReceiver(), WeightReceiver()

    def leave(offer: Offer, me: Receiver) -> None:
        arriving = leaves.receive(receive_for(offer, me, who))
        next(arriving)
        arriving.close()  # type: ignore[attr-defined]

    weights = [{"actor": lambda: named.items()}]
    sent, _ = run(world, weights, {"rollout-0": taker(stays, who), "rollout-1": leave}, epoch=1, seconds=5.0, who=who)
    assert isinstance(sent[0], TransferError)
    sent, taken = run(
        world, weights, {"rollout-0": taker(stays, who), "rollout-1": taker(leaves, who)}, epoch=2, who=who
    )
    assert isinstance(sent[0], dict)
    assert same(taken["rollout-0"], named)
    assert same(taken["rollout-1"], named)


def test_weights_of_another_shape_than_planned_are_refused_then_planned_anew() -> None:
    world = World([{"critic": (0, 0)}])
    who = RECEIVERS[2:]
    receiver = {"scorer-0": taker(WeightReceiver(), who)}
    run(world, [{"critic": lambda: stage(1, range(3)).items()}], receiver, epoch=1, who=who)
    other = {"model.layers.0.w": torch.ones(3)}
    sent, _ = run(world, [{"critic": lambda: other.items()}], receiver, epoch=1, seconds=3.0, who=who)
    assert isinstance(sent[0], TransferError)
    assert "changed" in str(sent[0])
    sent, taken = run(world, [{"critic": lambda: other.items()}], receiver, epoch=2, who=who)
    assert same(taken["scorer-0"], other)


def test_an_offer_that_cannot_be_posted_fails_all_ranks_at_once() -> None:
    world = World([{"actor": (0, 0)}, {"actor": (1, 0)}])

    def refuse(offer: Offer) -> None:
        raise OSError("connection refused")

    for sender in world.senders:
        sender._post_offer = refuse
    command = Publish(id="x", version=1, epoch=1, receivers=RECEIVERS[:1])
    with ThreadPoolExecutor(2) as pool:
        errors = [
            pool.submit(s.publish, command, {"actor": stage(0, range(2)).items()}).exception for s in world.senders
        ]
        assert all("offer" in str(e(timeout=PATIENCE)) for e in errors)


@pytest.mark.slow
def test_a_sender_that_is_gone_or_frozen_is_noticed_though_its_store_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.5)
    with pytest.raises(TransferError, match=r"no sender answers at 127.0.0.1:\d+"):
        call("127.0.0.1", free_port(), "secret", Deadline(100_000.0))
    late = pytest.raises(TransferError, match=r"no sender answers at 127.0.0.1:\d+")
    with socket.create_server(("127.0.0.1", 0)) as silent, late:  # the kernel accepts for a frozen process
        call("127.0.0.1", silent.getsockname()[1], "secret", Deadline(100_000.0))
    frozen = threading.Event()

    class Store:
        def check(self, keys: list[str]) -> bool:
            return frozen.wait(PATIENCE)

    meeting = rendezvous.Rendezvous(Store(), 0, 2)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(TransferError, match=r"did not answer within 0.5 s"):
            meeting.wait(["joined/0"], Deadline(240.0), lambda: "late", "while its ranks were still meeting")
    frozen.set()


def test_the_checksum_sees_moved_rows_and_any_bit() -> None:
    data = torch.randint(0, 256, (5 * 16384 + 48,), dtype=torch.uint8)
    before = checksum(data)
    swapped = data.clone()
    swapped[:16384], swapped[16384:32768] = data[16384:32768], data[:16384]
    assert not torch.equal(checksum(swapped), before)
    for bit in (0, 77_777, data.numel() - 1):
        other = data.clone()
        other[bit] ^= 128
        assert not torch.equal(checksum(other), before)
    assert torch.equal(checksum(data.clone()), before)


def test_more_bytes_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sending.SLOWEST, "gloo", 1000.0)
    world = World([{"critic": (0, 0)}])
    who, named = RECEIVERS[2:], {"w": torch.zeros(10_000)}
    receivers = {"scorer-0": taker(WeightReceiver(), who)}
    sent, _ = run(world, [{"critic": lambda: named.items()}], receivers, epoch=1, seconds=100.0, who=who)
    assert isinstance(sent[0], dict)
    assert world.offers[-1].deadline_seconds == pytest.approx(100.0 + 40_000 / 1000.0, abs=30.0)


def test_deadlines_count_down() -> None:
    now = [0.0]
    deadline = Deadline(5.0, lambda: now[0])
    now[0] = 4.0
    assert deadline.left().total_seconds() == pytest.approx(1.0)
    now[0] = 5.5
    with pytest.raises(TransferError, match="5 s"):
        deadline.left()
