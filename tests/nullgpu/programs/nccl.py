"""Programs that use torch's ProcessGroupNCCL in ways that it must refuse or that never end."""

from __future__ import annotations

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
