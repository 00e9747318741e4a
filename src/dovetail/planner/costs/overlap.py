"""Computes the seconds of inference after generation, and how much of them inter-stage fusion hides (RLHFuse section
4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from dovetail.planner.candidate import Candidate, Share, Task
from dovetail.planner.costs.generation import GenerationTimes


def busiest(work: Iterable[tuple[Share, float]]) -> float:
    """The seconds of the busiest GPU, if tasks that share a GPU take turns. `work`: the shares of all tasks with their
    seconds."""
    tasks = list(work)
    most = 0.0
    for share, _ in tasks:
        # The sum can only grow at a GPU where a share begins.
        total = sum(s for other, s in tasks if other.pool == share.pool and share.first in other.range)
        most = max(most, total)
    return most


def exposed_inference(
    candidate: Candidate, batch: int, generated: GenerationTimes, scored: Sequence[tuple[Task, Share, float]]
) -> float:
    """The seconds of inference that are left after generation.

    With fusion, shares on GPUs of their own score while samples still come, all but the last ones. Shares on the
    servers' GPUs score from the gathering on, on the GPUs that are free by then. `batch`: the samples of an iteration.
    `scored`: each inference task's shares with the seconds of their part of the batch."""
    if candidate.migration is None or not scored:
        return busiest((share, seconds) for _, share, seconds in scored)
    most = 0.0
    for _, corner, _ in scored:
        here = [each for each in scored if each[1].pool == corner.pool and corner.first in each[1].range]
        total = sum(seconds for _, _, seconds in here)
        early = [(share, seconds) for task, share, seconds in here if task != "actor_training"]
        # A pass over the last samples always remains.
        rest = sum(seconds * min(1.0, share.dp * share.micro_batch / batch) for share, seconds in early)
        most = max(most, rest, total - _hidden(candidate, generated, early))
    return most


def _hidden(candidate: Candidate, generated: GenerationTimes, tasks: Sequence[tuple[Share, float]]) -> float:
    """The seconds of one GPU's tasks that are done before generation ends.

    A copy of a model that is split over GPUs works when all of these GPUs are free. Any set of servers is equally
    likely to get the tail."""
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
    """Counts the copies of a share's model, by the number of servers on whose GPUs a copy lies."""
    if share.pp == share.tp == 1:
        return Counter({1: share.dp})
    starts = share.first + share.tp * np.arange(share.pp * share.dp).reshape(share.pp, share.dp)
    gpus = np.concatenate([starts + t for t in {*range(0, share.tp, serving.tp), share.tp - 1}])
    at = (gpus - serving.first) // serving.tp % serving.dp
    at[(gpus < serving.first) | (gpus >= serving.first + serving.gpus)] = -1
    at.sort(axis=0)
    return Counter((np.diff(at, axis=0, prepend=-1) > 0).sum(axis=0).tolist())


def _all_free(some: int, busy: int, servers: int) -> float:
    """The probability that none of `some` given servers is among the `busy` ones, which are drawn at random."""
    return math.comb(servers - some, busy) / math.comb(servers, busy) if some <= servers else 0.0
