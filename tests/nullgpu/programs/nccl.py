"""Programs that use torch's ProcessGroupNCCL in ways that it must refuse or that never end."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from worker import Place


def form(place: Place) -> None:
    torch.cuda.set_device(place.rank)
    store = dist.FileStore(str(place.folder / "store"), place.world)
    dist.init_process_group("nccl", store=store, rank=place.rank, world_size=place.world)


def unlike_sizes(place: Place) -> None:
    """Rank 0 sends eight floats, rank 1 receives four."""
    form(place)
    if place.rank == 0:
        dist.send(torch.zeros(8, device="cuda"), 1)
    else:
        dist.recv(torch.zeros(4, device="cuda"), 0)
    torch.cuda.synchronize()


def unlike_kinds(place: Place) -> None:
    """Rank 0 sums what rank 1 broadcasts."""
    form(place)
    if place.rank == 0:
        dist.all_reduce(torch.zeros(8, device="cuda"))
    else:
        dist.broadcast(torch.zeros(8, device="cuda"), 1)
    torch.cuda.synchronize()


def unlike_roots(place: Place) -> None:
    """Each rank broadcasts from itself."""
    form(place)
    dist.broadcast(torch.zeros(8, device="cuda"), place.rank)
    torch.cuda.synchronize()


def unlike_order(place: Place) -> None:
    """Rank 0 sends eight floats and then four, rank 1 receives four and then eight."""
    form(place)
    for size in (8, 4) if place.rank == 0 else (4, 8):
        tensor = torch.zeros(size, device="cuda")
        dist.send(tensor, 1) if place.rank == 0 else dist.recv(tensor, 0)
    torch.cuda.synchronize()


def late(place: Place) -> tuple[float, float]:
    """Rank 1 comes late to the first collective. When the rank came and when its host went on, in seconds."""
    form(place)
    if place.rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    dist.all_reduce(torch.zeros(8, device="cuda"))
    return began, time.monotonic()


def crossed(place: Place) -> None:
    """Both ranks send before they receive."""
    form(place)
    dist.send(torch.zeros(8, device="cuda"), 1 - place.rank)
    dist.recv(torch.zeros(8, device="cuda"), 1 - place.rank)
    torch.cuda.synchronize()


def missing(place: Place) -> None:
    """Rank 1 goes before the first collective."""
    form(place)
    if place.rank == 0:
        dist.all_reduce(torch.zeros(8, device="cuda"))
