"""Chooses the link that carries a sender's messages to each of its receivers. The functions are pure and need no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Way = Literal["ipc", "nccl", "gloo"]


class Place(NamedTuple):
    """The place of a rank's tensors. `gpu`: the UUID of its GPU or MIG slice, or None without a GPU. `nccl`: the
    version of its NCCL, such as 22907, or None without NCCL. `board`: the GPU as NCCL identifies it (`nccl.board_of`),
    or None if it is not known. All MIG slices of a GPU have the same board."""

    gpu: str | None = None
    nccl: int | None = None
    board: str | None = None


def routes(places: Sequence[Place]) -> dict[int, Way]:
    """The link for each receiver, by rank. `places[0]` is the sender's place.

    NCCL refuses two ranks on one GPU, even on different MIG slices of it. It also refuses ranks of different versions.
    A receiver on the sender's GPU or slice maps the sender's memory (CUDA IPC). All other receivers that NCCL would
    refuse get their weights through host memory (Gloo)."""
    sender = places[0]
    ways: dict[int, Way] = {}
    taken = {sender.board or sender.gpu}
    for rank, place in enumerate(places[1:], 1):
        if place.gpu is None or sender.gpu is None:
            ways[rank] = "gloo"
        elif place.gpu == sender.gpu:
            ways[rank] = "ipc"
        elif place.nccl is None or place.nccl != sender.nccl or (place.board or place.gpu) in taken:
            ways[rank] = "gloo"
        else:
            ways[rank] = "nccl"
            taken.add(place.board or place.gpu)
    return ways
