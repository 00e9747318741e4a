"""Computes the seconds of generation in closed form, with long-tailed lengths and a tail that gathers on fewer servers,
and how much of inference inter-stage fusion hides behind it (RLHFuse section 4).

The event simulation in `dovetail.planner.simulate` is exact for given lengths. The closed form takes a thousandth of
its time. On each server samples with the quantiles of the length distribution start together. While n samples are left,
a decode step takes t(n). So generation takes the sum of (l[k] - l[k - 1]) t(n), where l are the sorted lengths and l[k]
is the shortest of the n that are left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dovetail.fusion.lengths import Lengths
from dovetail.planner.candidate import Candidate, Share, Task
from dovetail.planner.workload import Workload

Floats = npt.NDArray[np.float64]
# With more samples than this, fewer quantiles are computed, and each stands for several samples.
EXACT = 512


@dataclass(frozen=True, eq=False)
class Servers:
    """`count` equal vLLM servers. `steps`, float64: the seconds of a decode step with 0, 1, ... samples. `prefill`:
    seconds per token. `room`: tokens of the KV cache. `saturation`: the largest batch whose step takes almost as long
    as that of one sample (BS_max). `arrival`: seconds per token to bring a sample from another server, by a prefill or
    by a transfer of its KV cache."""

    count: int
    steps: Floats
    prefill: float
    room: int
    saturation: int
    arrival: float

    def slots(self, tokens: float) -> int:
        """The number of samples of `tokens` tokens that a server generates at once. It is at least 1."""
        return max(1, min(len(self.steps) - 1, int(self.room // max(1.0, tokens))))


@dataclass(frozen=True)
class GenerationTimes:
    """`seconds`: when generation ends. `gathered`: when the tail moved to `destinations` of the `servers` servers. The
    other servers are free from then on. Without a migration it is the end. Both are seconds since generation began."""

    seconds: float
    gathered: float
    destinations: int
    servers: int


def generate(servers: Sequence[Servers], work: Workload, migration: float | None = None) -> GenerationTimes:
    """The times of generating a batch. The servers share the samples by their speed. `migration`: the tail gathers when
    this fraction of the samples is left. None: it does not gather."""
    instances = sum(s.count for s in servers)
    dealt = deal(servers, work.batch)
    end = max(float(_curve(s, n, work)[1][-1]) for s, n in zip(servers, dealt, strict=True))
    left = 0 if migration is None else int(migration * work.batch)
    fastest = servers[max(range(len(servers)), key=lambda i: dealt[i])]
    destinations = _destinations(fastest, instances, left, work.longest)
    if not left or destinations is None:
        return GenerationTimes(end, end, instances, instances)
    # The samples that are left are the longest of the batch. They gather when the next shorter one is done.
    done = float(quantiles(work.response, work.batch)[-left])
    begun = max(_reached(s, n, work, done) for s, n in zip(servers, dealt, strict=True))
    return GenerationTimes(begun + _tail(fastest, work, left, destinations), begun, destinations, instances)


def deal(servers: Sequence[Servers], batch: int) -> list[int]:
    """The number of samples that one server of each kind gets, in proportion to its speed."""
    share = max(1, -(-batch // sum(s.count for s in servers)))
    speeds = [s.count / float(s.steps[min(share, len(s.steps) - 1)]) for s in servers]
    return [max(1, math.ceil(batch * speed / sum(speeds) / s.count)) for s, speed in zip(servers, speeds, strict=True)]


def _destinations(server: Servers, instances: int, left: int, longest: int) -> int | None:
    """The number of servers for the tail, m = max(R / BS_max, R KV / M), as in RLHFuse section 4.2. None if no server
    would be free. R is `left`, KV the cache of `longest` tokens, and M a server's memory for it."""
    slots = max(1, min(server.saturation, server.room // max(1, longest)))
    wanted = -(-left // slots)
    return wanted if wanted < instances else None


def _curve(server: Servers, samples: int, work: Workload) -> tuple[Floats, Floats]:
    """The lengths of the last n samples of a server, (n,), and when each is done, (n,) seconds. n is the number of
    samples that the server holds at once."""
    slots = min(samples, server.slots(work.tokens))
    lengths = _of_server(work.response, slots, work.batch)
    gaps = np.diff(lengths, prepend=1.0)  # the prefill makes the first token
    ends: Floats = np.cumsum(gaps * server.steps[slots:0:-1])
    waiting = samples - slots
    bulk = waiting * work.response.mean / slots * float(server.steps[slots])
    return lengths, ends + bulk + samples * work.prompt.mean * server.prefill


def _reached(server: Servers, samples: int, work: Workload, tokens: float) -> float:
    """The seconds until a server has generated `tokens` tokens of every sample that has so many."""
    lengths, ends = _curve(server, samples, work)
    first = float(ends[0]) - (float(lengths[0]) - 1.0) * float(server.steps[len(lengths)])
    return float(np.interp(tokens, np.concatenate(([1.0], lengths)), np.concatenate(([first], ends))))


def _tail(server: Servers, work: Workload, left: int, destinations: int) -> float:
    """The seconds from the gathering to the last token. Each destination takes its part of the tail, prefills the
    samples that came, and goes on."""
    longest = quantiles(work.response, work.batch)[-left:].copy()
    longest[-1] = max(float(longest[0]), expected_longest(work.response, work.batch))
    done = float(longest[0])
    mine = np.sort(longest[::-1][::destinations]) - done
    gaps = np.diff(mine, prepend=0.0)
    slots = min(len(mine), len(server.steps) - 1)
    came = (1 - 1 / max(1, destinations)) if destinations > 1 else 1.0
    moved = len(mine) * came * (work.prompt.mean + done) * server.arrival
    # If a destination has more samples than slots, the others wait until a slot is free.
    over = max(1.0, len(mine) / slots)
    counts = np.minimum(np.arange(len(mine), 0, -1), slots)
    return moved + over * float(gaps @ server.steps[counts])


@lru_cache(maxsize=4096)
def quantiles(lengths: Lengths, count: int) -> Floats:
    """The lengths of `Lengths.quantiles`, (count,) float64."""
    few = min(count, EXACT)
    found = lengths.quantiles(few).astype(np.float64)
    return found if few == count else np.sort(np.resize(np.repeat(found, -(-count // few)), count))


@lru_cache(maxsize=4096)
def _of_server(lengths: Lengths, samples: int, batch: int) -> Floats:
    """The lengths of one server's samples, (samples,) float64. They are quantiles, but the longest one is that of the
    whole batch, because one server has it."""
    mine = quantiles(lengths, samples).copy()
    mine[-1] = max(float(mine[-1]), expected_longest(lengths, batch))
    return mine


@lru_cache(maxsize=4096)
def expected_longest(lengths: Lengths, samples: int) -> float:
    """The mean length of the longest of n samples. It is the mean of Q(u^(1/n)), where u is uniform and Q is the
    quantile function."""
    levels = (np.arange(64) + 0.5) / 64
    normal = NormalDist()
    z = np.array([normal.inv_cdf(float(u)) for u in levels ** (1 / samples)])
    return float(np.clip(lengths.median * np.exp(lengths.sigma * z), 1, lengths.longest).mean())


# ------------------------------------------------------------ inference beside it


def exposed_inference(
    candidate: Candidate, batch: int, generated: GenerationTimes, scored: Sequence[tuple[Task, Share, float]]
) -> float:
    """The seconds of inference that are left after generation, on the busiest GPU. Tasks that share a GPU take turns.

    With fusion, shares on GPUs of their own score all samples but the last ones during generation. Shares on the
    servers' GPUs score after the tail has gathered, on the GPUs that are free by then. `batch`: the samples of an
    iteration. `scored`: each inference task's shares with the seconds of their part of the batch."""
    most = 0.0
    for _, corner, _ in scored:
        # The sum can only grow at a GPU where a share begins.
        here = [each for each in scored if each[1].pool == corner.pool and corner.first in each[1].range]
        total = sum(seconds for _, _, seconds in here)
        if candidate.migration is None:
            most = max(most, total)
            continue
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
