"""Which link carries weights to each receiver."""

from __future__ import annotations

import pytest

from dovetail.models.links.link_choice import Place, routes

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
