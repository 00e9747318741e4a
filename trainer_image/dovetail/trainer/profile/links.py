"""Latency and bandwidth of messages between two processes on this machine, and the time of a message between ranks that
train."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dovetail.models.transfer import store_at
from dovetail.protocol.files.machine_profile import LinkTimes
from dovetail.protocol.process.inheritance import LOOPBACK_SOCKETS
from dovetail.trainer.communication.groups import Edges, ModelGroups, peer_errors, receive, send

_SMALL, _LARGE = 1, 4 * 2**20  # numbers of float32 values


def measure_link(gpu: bool = False, repeats: int = 30, seconds: float = 60.0) -> LinkTimes:
    """Latency (seconds) and bandwidth (bytes per second) between two processes, from the times of round trips.

    They use Gloo, or NCCL between GPUs 0 and 1. It starts both processes. Raises TimeoutError if they do not finish
    within `seconds`, and RuntimeError if one of them fails."""
    context: Any = torch.multiprocessing.get_context("spawn")
    store = store_at("127.0.0.1", 0, None, timedelta(seconds=seconds))
    answers = context.SimpleQueue()
    started = time.monotonic()
    peers = [
        context.Process(target=_peer, args=(rank, store.port, gpu, repeats, seconds, answers), daemon=True)
        for rank in (0, 1)
    ]
    try:
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.join(max(0.0, started + seconds - time.monotonic()))
        if any(peer.exitcode is None for peer in peers):
            raise TimeoutError(f"two processes did not finish exchanging messages within {seconds:g} s")
        if any(peer.exitcode for peer in peers) or answers.empty():
            raise RuntimeError(
                f"a process that measures messages failed (exit code {peers[0].exitcode or peers[1].exitcode})"
            )
        latency, rate = answers.get()
        return LinkTimes(latency=latency, bytes_per_second=rate)
    finally:
        for peer in peers:
            with suppress(ValueError, AttributeError):
                peer.kill()


def _peer(rank: int, port: int, gpu: bool, repeats: int, seconds: float, answers: Any) -> None:
    os.environ |= LOOPBACK_SOCKETS
    timeout = timedelta(seconds=seconds)
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timeout)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        trips = [_round_trips(rank, torch.zeros(size, device=device), repeats) for size in (_SMALL, _LARGE)]
        if rank == 0:
            latency = trips[0] / 2
            transfer = max(trips[1] / 2 - latency, 1e-9)
            answers.put((latency, 4 * _LARGE / transfer))
    finally:
        dist.destroy_process_group()


def _round_trips(rank: int, tensor: torch.Tensor, repeats: int) -> float:
    """The median seconds of a round trip."""
    seconds = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(tensor, dst=1 - rank)
            else:
                dist.recv(tensor, src=1 - rank)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


REPEATS = 7


def measure_transfers(
    models: Mapping[str, ModelGroups], boundaries: Mapping[str, tuple[torch.Size, torch.dtype]], device: torch.device
) -> dict[str, float]:
    """Seconds of a message to the next stage, by model, on every rank that is not a model's last place.

    It is half of the median round trip of a tensor with the shape and dtype in `boundaries`. This is a collective call.
    Every rank must make it with the same models. Edges that share a rank take turns. Raises PeerLost."""
    found = {}
    for name in sorted(boundaries):
        groups = models[name]
        for turn in (0, 1):
            first = groups.pp_rank % 2 == turn
            edge = groups.edges[0]
            peer = edge.next if first else edge.previous
            if peer is None:
                continue
            shape, dtype = boundaries[name]
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            with peer_errors(f"measuring messages to trainer rank {peer}"):
                seconds = [_round_trip(edge, peer, tensor, first, groups.staged) for _ in range(REPEATS + 1)]
            if first:
                # The first trip is a warm-up.
                found[name] = statistics.median(seconds[1:]) / 2
    return found


def _round_trip(edge: Edges, peer: int, tensor: torch.Tensor, first: bool, staged: bool) -> float:
    start = time.perf_counter()
    if first:
        send(tensor, peer, edge.forward_out, staged)
        receive(tensor, peer, edge.backward_in, staged)
    else:
        receive(tensor, peer, edge.forward_in, staged)
        send(tensor, peer, edge.backward_out, staged)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
