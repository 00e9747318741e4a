"""Part 1: ranks that hold a training layout come to hold a generation layout, by the routing table or by broadcasts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from papers.routing import RankGrid, RoutingTable, Tensor, route

from dovetail.protocol.weights.layout import Box
from switching.shapes import tensors

Held = dict[str, tuple[Box, torch.Tensor]]
# Messages between two ranks are packed up to this, bytes.
MESSAGE_BYTES = 32 << 20


def run(rank: int, world: int, port: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's times by way, and bytes received."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    source, target = RankGrid(**settings["source"]), RankGrid(**settings["target"])
    model, layers = tensors(settings["layers"], settings["hidden"]), settings["layers"]
    table = route(model, layers, source, target)
    held = {t.name: part(t, source, rank, layers) for t in model if holds(t, source, rank, layers)}
    wanted: Held = {t.name: blank(t, target, rank, layers) for t in model if holds(t, target, rank, layers)}
    ways: dict[str, Callable[[], int]] = {
        "routed": lambda: routed(table, held, wanted, rank),
        "broadcast of everything": lambda: broadcast(model, layers, source, held, wanted, rank),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        seconds = []
        for _ in range(settings["repeats"] + 1):
            for _, tensor in wanted.values():
                tensor.fill_(-1)
            dist.barrier()
            begin = time.monotonic()
            received = way()
            dist.barrier()
            seconds.append(time.monotonic() - begin)
        for t in model:
            if t.name in wanted:
                box, tensor = wanted[t.name]
                if not torch.equal(tensor, content(t, box)):
                    raise RuntimeError(f"{name}: rank {rank} holds a wrong {t.name}")
        found[name] = {"seconds": statistics.median(seconds[1:]), "received": received}
    found["least"] = int(table.received[rank])
    dist.destroy_process_group()
    return found


def holds(tensor: Tensor, layout: RankGrid, rank: int, layers: int) -> bool:
    return any(rank in ranks for ranks in layout.boxes(tensor, layers).values())


def content(tensor: Tensor, box: Box) -> torch.Tensor:
    """What belongs into `box`: every element of a tensor's first rows and columns differs from its neighbours."""
    value = torch.zeros(tuple(end - start for start, end in box))
    for dim, (start, end) in enumerate(box):
        shape = [1] * len(box)
        shape[dim] = end - start
        value += torch.arange(start, end, dtype=torch.float32).view(shape) * (1 + 3 * dim)
    return value + len(tensor.name)


def part(tensor: Tensor, layout: RankGrid, rank: int, layers: int) -> tuple[Box, torch.Tensor]:
    box = next(box for box, ranks in layout.boxes(tensor, layers).items() if rank in ranks)
    return box, content(tensor, box)


def blank(tensor: Tensor, layout: RankGrid, rank: int, layers: int) -> tuple[Box, torch.Tensor]:
    box = next(box for box, ranks in layout.boxes(tensor, layers).items() if rank in ranks)
    return box, torch.empty(tuple(end - start for start, end in box))


def view(held: tuple[Box, torch.Tensor], box: Box) -> torch.Tensor:
    mine, tensor = held
    return tensor[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, mine, strict=True))]


def routed(table: RoutingTable, held: Held, wanted: Held, rank: int) -> int:
    """Carry out the table; bytes received. What goes from one rank to another is packed into few messages."""
    for name, box, owner in table.kept:
        if owner == rank:
            view(wanted[name], box).copy_(view(held[name], box))
    lists: dict[tuple[int, int], list[list[tuple[str, Box, int]]]] = {}
    for t in table.transfers:
        for destination in t.destinations:
            if rank not in (t.source, destination):
                continue
            messages = lists.setdefault((t.source, destination), [[]])
            if messages[-1] and sum(n for _, _, n in messages[-1]) + t.bytes > MESSAGE_BYTES:
                messages.append([])
            messages[-1].append((t.tensor, t.box, t.bytes))
    coming, works, received = [], [], 0
    for (source, destination), messages in sorted(lists.items()):
        for parts in messages:
            if destination == rank:
                buffer = torch.empty(sum(n for _, _, n in parts) // 4)
                coming.append((dist.irecv(buffer, src=source), buffer, parts))
                received += buffer.nbytes
    for (source, destination), messages in sorted(lists.items()):
        for parts in messages:
            if source == rank:
                buffer = torch.cat([view(held[name], box).reshape(-1) for name, box, _ in parts])
                works.append((dist.isend(buffer, dst=destination), buffer))
    for work, buffer, parts in coming:
        work.wait()
        end = 0
        for name, box, size in parts:
            place = view(wanted[name], box)
            place.copy_(buffer[end : end + size // 4].view(place.shape))
            end += size // 4
    for work, _ in works:
        work.wait()
    return received


def broadcast(model: list[Tensor], layers: int, source: RankGrid, held: Held, wanted: Held, rank: int) -> int:
    """Every part from its first holder to everybody, who keep what they need; bytes received."""
    received = 0
    for t in model:
        whole = torch.empty(t.shape)
        for box, ranks in source.boxes(t, layers).items():
            shape = tuple(end - start for start, end in box)
            buffer = held[t.name][1] if rank == ranks[0] else torch.empty(shape)
            dist.broadcast(buffer, src=ranks[0])
            received += 0 if rank == ranks[0] else buffer.nbytes
            whole[tuple(slice(*interval) for interval in box)] = buffer
        if t.name in wanted:
            box, tensor = wanted[t.name]
            tensor.copy_(whole[tuple(slice(*interval) for interval in box)])
    return received
