"""Seconds of inference after generation, and what inter-stage fusion hides of them (RLHFuse section 4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from dovetail.planner.candidate import Candidate, Share, Task
from dovetail.planner.costs.generation import GenerationTimes


def busiest(work: Iterable[tuple[Share, float]]) -> float:
    """Most seconds of any GPU, tasks that share it taking turns."""
    tasks = list(work)
    most = 0.0
    for share, _ in tasks:
        # Where any share begins is where sums change.
        total = sum(s for other, s in tasks if other.pool == share.pool and share.first in other.range)
        most = max(most, total)
    return most


def exposed_inference(
    candidate: Candidate, batch: int, generated: GenerationTimes, scored: Sequence[tuple[Task, Share, float]]
) -> float:
    """Seconds after generation. Fused: shares beside the servers score while samples still come, all but the last;
    shares on their GPUs from the gathering on, on the part of them that is free by then."""
    if candidate.migration is None or not scored:
        return busiest((share, seconds) for _, share, seconds in scored)
    most = 0.0
    for _, corner, _ in scored:
        here = [each for each in scored if each[1].pool == corner.pool and corner.first in each[1].range]
        total = sum(seconds for _, _, seconds in here)
        early = [(share, seconds) for task, share, seconds in here if task != "actor_training"]
        # The last samples come last: a pass over them remains.
        rest = sum(seconds * min(1.0, share.dp * share.micro_batch / batch) for share, seconds in early)
        most = max(most, rest, total - _hidden(candidate, generated, early))
    return most


def _hidden(candidate: Candidate, generated: GenerationTimes, tasks: Sequence[tuple[Share, float]]) -> float:
    """Seconds of tasks on one GPU that are done by the end of generation. A copy of a model that is split over GPUs
    works when all of these are free, whichever servers the tail gathers on."""
    beside, after = [], []
    for share, seconds in tasks:
        on = next((other for other in candidate.generation if share.overlaps(other)), None)
        if on is not None:
            busy, servers = generated.destinations, generated.servers
            spread = Counter({1: share.dp}) if candidate.beside else _spread(share, on)
            free = sum(n * _all_free(k, busy, servers) for k, n in spread.items())
            after.append((free / share.dp, seconds))
        else:
            beside.append(seconds)
    hidden = min(generated.seconds, sum(beside))
    left = min(generated.seconds - generated.gathered, generated.seconds - hidden)
    for speed, seconds in sorted(after, reverse=True):
        if speed > 0:
            done = min(seconds, left * speed)
            hidden += done
            left -= done / speed
    return hidden


@lru_cache(maxsize=8192)
def _spread(share: Share, serving: Share) -> Counter[int]:
    """Number of the share's copies by the number of servers that have GPUs of the copy."""
    if share.pp == share.tp == 1:
        return Counter({1: share.dp})
    starts = share.first + share.tp * np.arange(share.pp * share.dp).reshape(share.pp, share.dp)
    gpus = np.concatenate([starts + t for t in {*range(0, share.tp, serving.tp), share.tp - 1}])
    at = (gpus - serving.first) // serving.tp % serving.dp
    at[(gpus < serving.first) | (gpus >= serving.first + serving.gpus)] = -1
    at.sort(axis=0)
    return Counter((np.diff(at, axis=0, prepend=-1) > 0).sum(axis=0).tolist())


def _all_free(some: int, busy: int, servers: int) -> float:
    """Chance that none of `some` of the servers is one of the `busy` ones."""
    return math.comb(servers - some, busy) / math.comb(servers, busy) if some <= servers else 0.0
