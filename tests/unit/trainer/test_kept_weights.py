"""Versions of the weights that a rank keeps, and the messages between the threads that send them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.models.transfer import Part, store_at
from dovetail.protocol.weights.layout import StageRanks
from dovetail.trainer.communication.groups import PeerLost
from dovetail.trainer.rank.sending import Exchange
from dovetail.trainer.weight_sender import WeightParts
from dovetail.trainer.weights.kept_weights import KeptWeights
from helpers.patience import PATIENCE


class OneTensor:
    """An engine of one model with one tensor."""

    def __init__(self, dp_rank: int = 0) -> None:
        self.weight, self.step = torch.zeros(4), 0
        self.groups = SimpleNamespace(device=torch.device("cpu"))
        self.models = {"actor": SimpleNamespace(groups=SimpleNamespace(dp_rank=dp_rank, tp_rank=0))}

    def sendable(self, model: str, most: int) -> WeightParts:
        return WeightParts(lambda: iter([Part("w", (4,), ((0, 4),), self.weight)]), StageRanks())

    def learn(self) -> None:
        self.step += 1
        self.weight += 1


def values(kept: KeptWeights, version: int) -> list[float]:
    with kept.using(version) as found:
        assert found is not None
        return [x for part in found.models["actor"].iterate() for x in part.tensor.tolist()]  # type: ignore[attr-defined]


def test_a_step_does_not_change_what_is_kept_and_the_newest_are_kept() -> None:
    engine, kept = OneTensor(), KeptWeights()
    kept.begin(2)
    for _ in range(4):
        kept.add(kept.copy(engine, 1), None)  # type: ignore[arg-type]
        engine.learn()
    assert kept.versions == [2, 3]
    assert (values(kept, 2), values(kept, 3)) == ([2.0] * 4, [3.0] * 4)
    with kept.using(1) as gone:
        assert gone is None


def test_a_version_that_is_being_sent_stays_as_it_is() -> None:
    engine, kept = OneTensor(), KeptWeights()
    kept.begin(1)
    kept.add(kept.copy(engine, 1), None)  # type: ignore[arg-type]
    with kept.using(0) as sent:
        assert sent is not None
        for _ in range(3):
            engine.learn()
            kept.add(kept.copy(engine, 1), None)  # type: ignore[arg-type]
        (part,) = sent.models["actor"].iterate()
        assert part.tensor.tolist() == [0.0] * 4  # type: ignore[attr-defined]
    assert kept.versions == [3]


def test_a_rank_that_sends_nothing_keeps_nothing() -> None:
    engine, kept = OneTensor(dp_rank=1), KeptWeights()
    kept.begin(1)
    kept.add(kept.copy(engine, 1), None)  # type: ignore[arg-type]
    assert values(kept, 0) == []


def exchanges(over: threading.Event) -> list[Exchange]:
    store = store_at("127.0.0.1", 0, None, timedelta(seconds=20), wait_for_workers=False)
    made = []
    for rank in range(2):
        groups: Any = SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"), model={})
        client = store if rank == 0 else torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)
        made.append(Exchange(groups, client, timedelta(seconds=20), over.is_set))
    return made


def test_threads_of_two_ranks_exchange_messages() -> None:
    def talk(exchange: Exchange) -> list[Any]:
        heard = []
        for turn in range(3):
            heard.append(exchange.broadcast_json([turn, "word"] if exchange.rank == 0 else None, patient=True))
            heard.append(exchange.gather_json({"rank": exchange.rank, "turn": turn}))
        return heard

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(talk, exchanges(threading.Event()))
    assert first[::2] == second[::2] == [[turn, "word"] for turn in range(3)]
    assert first[1::2] == [[{"rank": rank, "turn": turn} for rank in range(2)] for turn in range(3)]
    assert second[1::2] == [None] * 3


def test_a_wait_ends_when_the_generation_is_over() -> None:
    over = threading.Event()
    _, second = exchanges(over)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.broadcast_json, None, True)
        over.set()
        with pytest.raises(PeerLost, match="the generation is over"):
            waiting.result(PATIENCE)
