"""Chooses the link that carries a sender's messages to each of its receivers. The functions are pure and need no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Way = Literal["ipc", "nccl", "gloo"]


class Place(NamedTuple):
    """The place of a rank's tensors. `gpu`: the UUID of its GPU. None: it has none. `nccl`: the version of its NCCL,
    such as 22907. None: it has none."""

    gpu: str | None = None
    nccl: int | None = None


def routes(places: Sequence[Place]) -> dict[int, Way]:
    """The link for each receiver, by rank. `places[0]` is the sender's place.

    NCCL refuses two ranks on one GPU, and ranks of different versions. A receiver on the sender's GPU maps the sender's
    memory (CUDA IPC). All other receivers that NCCL would refuse get their weights through host memory (Gloo)."""
    sender = places[0]
    ways: dict[int, Way] = {}
    taken = {sender.gpu}
    for rank, place in enumerate(places[1:], 1):
        if place.gpu is None or sender.gpu is None:
            ways[rank] = "gloo"
        elif place.gpu == sender.gpu:
            ways[rank] = "ipc"
        elif place.nccl is None or place.nccl != sender.nccl or place.gpu in taken:
            ways[rank] = "gloo"
        else:
            ways[rank] = "nccl"
            taken.add(place.gpu)
    return ways
