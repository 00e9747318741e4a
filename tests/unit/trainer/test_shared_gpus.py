"""Trainer ranks find out whether two of them are on one GPU."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dovetail.trainer.communication import groups
from helpers.patience import PATIENCE


class Counted:
    """A store that counts the requests of one rank."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests = store, 0

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return bytes(self._store.get(key))


@pytest.mark.parametrize(("boards", "shared"), [(range(24), False), ([*range(23), 5], True)])
def test_all_ranks_know_it_and_none_asks_for_each_other(
    monkeypatch: pytest.MonkeyPatch, boards: Any, shared: bool
) -> None:
    """With a thousand ranks, a million requests to one store would take a minute."""
    store, found = dist.HashStore(), {}
    monkeypatch.setattr(groups, "board_of", lambda device: f"node/{boards[device.index]}")
    ranks = [
        groups.Groups(r, len(boards), timedelta(seconds=PATIENCE), torch.device("cuda", r)) for r in range(len(boards))
    ]
    stores = [Counted(store) for _ in ranks]

    def ask(rank: int) -> None:
        ranks[rank]._store = stores[rank]
        found[rank] = ranks[rank]._ranks_share_a_gpu()

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == dict.fromkeys(range(len(ranks)), shared)
    assert max(each.requests for each in stores[1:]) <= 3
    assert stores[0].requests <= len(ranks) + 3
