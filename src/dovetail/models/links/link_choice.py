"""Which link carries a sender's messages to each of its receivers. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Way = Literal["ipc", "nccl", "gloo"]


class Place(NamedTuple):
    """Where a rank's tensors are: the UUID of its GPU, None without one; and the version of its NCCL, None without."""

    gpu: str | None = None
    nccl: int | None = None


def routes(places: Sequence[Place]) -> dict[int, Way]:
    """The link for each receiver, by rank; `places[0]` is the sender's.

    NCCL refuses two ranks on one GPU, and ranks of unlike versions. A receiver on the sender's GPU maps the sender's
    memory (CUDA IPC). Every other receiver that NCCL would refuse gets its weights through host memory (Gloo)."""
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
