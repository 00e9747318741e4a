"""Which link carries weights to each receiver."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from dovetail.models.links.rendezvous import Place, Rendezvous, routes
from dovetail.models.transfer import read_place, tell_place

SENDER = Place("GPU-0", 22907, "0:1")


@pytest.mark.parametrize(
    ("receivers", "ways"),
    [
        ([Place("GPU-1", 22907), Place("GPU-2", 22907)], ["nccl", "nccl"]),
        ([Place("GPU-0", 22907), Place("GPU-1", 22907)], ["ipc", "nccl"]),
        ([Place("GPU-0", 22605), Place("GPU-1", 22605)], ["ipc", "gloo"]),  # versions don't matter to CUDA
        ([Place("GPU-1", 22907), Place("GPU-1", 22907)], ["nccl", "gloo"]),  # two receivers on one GPU
        ([Place("GPU-1", None), Place()], ["gloo", "gloo"]),
        # slices of the sender's GPU, and of another one
        (
            [Place("MIG-1", 22907, "0:1"), Place("MIG-2", 22907, "0:2"), Place("MIG-3", 22907, "0:2")],
            ["gloo", "nccl", "gloo"],
        ),
        ([Place("GPU-0", 22907, "0:1")], ["ipc"]),
    ],
)
def test_each_receiver_gets_a_link_that_takes_it(receivers: list[Place], ways: list[str]) -> None:
    assert routes([SENDER, *receivers]) == dict(enumerate(ways, 1))
    assert set(routes([Place(), *receivers]).values()) == {"gloo"}


def test_ranks_of_an_earlier_release_understand_places_and_are_understood() -> None:
    """They read and write two values. A trainer of that release raised TypeError at a third one."""
    store = dist.HashStore()
    meeting = Rendezvous(store, 0, 2)
    for rank, place in enumerate((Place(), Place("GPU-1", 22907, "node/0"))):
        tell_place(meeting, rank, place)
        assert json.loads(store.get(f"joined/{rank}")) == [place.gpu, place.nccl]
        assert read_place(meeting, rank) == place
    store.set("joined/2", json.dumps(["GPU-2", 22907]))
    assert read_place(meeting, 2) == Place("GPU-2", 22907)
