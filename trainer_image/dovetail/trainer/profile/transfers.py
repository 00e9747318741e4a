"""The time of a message from one stage to the next, measured once, between the ranks that train."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from dovetail.trainer.communication.groups import Edges, ModelGroups, peer_errors
from dovetail.trainer.communication.host_staging import receive, send

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
