"""Seconds of generation in closed form, with long-tailed lengths and a tail that gathers (RLHFuse section 4).

The event simulation of `dovetail.planner.simulate` is exact for given lengths; this takes a thousandth of its time.
Samples of the distribution's quantiles start together on each server. While n are left, a step takes t(n), so
generation takes the sum over n of (l[k] - l[k - 1]) t(n), l being the sorted lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dovetail.planner.workload import Lengths

Floats = npt.NDArray[np.float64]
# A decode step this much longer than that of one sample is no longer "almost constant" (RLHFuse section 4.2).
SATURATED = 1.1
# Beyond so many samples quantiles are taken of fewer, each standing for several.
EXACT = 512


@dataclass(frozen=True, eq=False)
class Servers:
    """`count` equal vLLM servers. `steps`: seconds of a decode step with 0, 1, ... samples. `prefill`: seconds a token.
    `room`: tokens of the KV cache. `saturation`: the batch up to which a step takes almost as long as with one
    (BS_max). `arrival`: seconds a token to bring a sample from another server, prefill or transfer of its cache."""

    count: int
    steps: Floats
    prefill: float
    room: int
    saturation: int
    arrival: float

    def slots(self, tokens: float) -> int:
        """Samples of `tokens` at once."""
        return max(1, min(len(self.steps) - 1, int(self.room // max(1.0, tokens))))


@dataclass(frozen=True)
class GenerationTimes:
    """Seconds since generation began. `gathered`: when the tail left for `destinations` servers (of `servers`), which
    is also when the others are free; with no migration, the end."""

    seconds: float
    gathered: float
    destinations: int
    servers: int


def generate(
    servers: Sequence[Servers],
    batch: int,
    prompt: Lengths,
    response: Lengths,
    migration: float | None = None,
) -> GenerationTimes:
    """The servers share `batch` samples by their speed. `migration`: fraction of the samples at which the tail
    gathers."""
    instances = sum(s.count for s in servers)
    dealt = deal(servers, batch)
    end = max(float(_curve(s, n, batch, prompt, response)[1][-1]) for s, n in zip(servers, dealt, strict=True))
    left = 0 if migration is None else int(migration * batch)
    fastest = servers[max(range(len(servers)), key=lambda i: dealt[i])]
    destinations = _destinations(fastest, instances, left, prompt.longest + response.longest)
    if not left or destinations is None:
        return GenerationTimes(end, end, instances, instances)
    # The samples that are left are the longest of the batch: it is gathered when the next shorter one is done.
    done = float(quantiles(response, batch)[-left])
    begun = max(_reached(s, n, batch, prompt, response, done) for s, n in zip(servers, dealt, strict=True))
    tail = _tail(fastest, batch, left, destinations, prompt, response)
    return GenerationTimes(begun + tail, begun, destinations, instances)


def deal(servers: Sequence[Servers], batch: int) -> list[int]:
    """Samples of one server of each kind."""
    share = max(1, -(-batch // sum(s.count for s in servers)))
    speeds = [s.count / float(s.steps[min(share, len(s.steps) - 1)]) for s in servers]
    return [max(1, math.ceil(batch * speed / sum(speeds) / s.count)) for s, speed in zip(servers, speeds, strict=True)]


def _destinations(server: Servers, instances: int, left: int, longest: int) -> int | None:
    """m = max(R / BS_max, R KV / M), as in RLHFuse section 4.2; None if nobody would be free."""
    slots = max(1, min(server.saturation, server.room // max(1, longest)))
    wanted = -(-left // slots)
    return wanted if wanted < instances else None


def _curve(server: Servers, samples: int, batch: int, prompt: Lengths, response: Lengths) -> tuple[Floats, Floats]:
    """(n,) lengths of the last n samples of a server, n being what it can hold at once, and when each is done."""
    slots = min(samples, server.slots(prompt.mean + response.mean))
    lengths = _of_server(response, slots, batch)
    gaps = np.diff(lengths, prepend=1.0)  # the prefill makes the first token
    ends: Floats = np.cumsum(gaps * server.steps[slots:0:-1])
    waiting = samples - slots
    bulk = waiting * response.mean / slots * float(server.steps[slots])
    return lengths, ends + bulk + samples * prompt.mean * server.prefill


def _reached(server: Servers, samples: int, batch: int, prompt: Lengths, response: Lengths, tokens: float) -> float:
    """When a server has `tokens` of each sample that is that long."""
    lengths, ends = _curve(server, samples, batch, prompt, response)
    first = float(ends[0]) - (float(lengths[0]) - 1.0) * float(server.steps[len(lengths)])
    return float(np.interp(tokens, np.concatenate(([1.0], lengths)), np.concatenate(([first], ends))))


def _tail(server: Servers, batch: int, left: int, destinations: int, prompt: Lengths, response: Lengths) -> float:
    """From the gathering to the last token: each destination takes its part, prefills what came, and goes on."""
    longest = quantiles(response, batch)[-left:].copy()
    longest[-1] = max(float(longest[0]), expected_longest(response, batch))
    done = float(longest[0])
    mine = np.sort(longest[::-1][::destinations]) - done
    gaps = np.diff(mine, prepend=0.0)
    slots = min(len(mine), len(server.steps) - 1)
    came = (1 - 1 / max(1, destinations)) if destinations > 1 else 1.0
    moved = len(mine) * came * (prompt.mean + done) * server.arrival
    # Beyond its slots a destination has samples wait, as long as it takes the others.
    over = max(1.0, len(mine) / slots)
    counts = np.minimum(np.arange(len(mine), 0, -1), slots)
    return moved + over * float(gaps @ server.steps[counts])


@lru_cache(maxsize=4096)
def quantiles(lengths: Lengths, count: int) -> Floats:
    """(count,) as `Lengths.quantiles`, in float64."""
    few = min(count, EXACT)
    found = lengths.quantiles(few).astype(np.float64)
    return found if few == count else np.sort(np.resize(np.repeat(found, -(-count // few)), count))


@lru_cache(maxsize=4096)
def _of_server(lengths: Lengths, samples: int, batch: int) -> Floats:
    """One server's samples: quantiles, the longest being that of the whole batch, as one server has it."""
    mine = quantiles(lengths, samples).copy()
    mine[-1] = max(float(mine[-1]), expected_longest(lengths, batch))
    return mine


@lru_cache(maxsize=4096)
def expected_longest(lengths: Lengths, samples: int) -> float:
    """The longest of so many samples, on average: of Q(u^(1/n)), u uniform."""
    levels = (np.arange(64) + 0.5) / 64
    normal = NormalDist()
    z = np.array([normal.inv_cdf(float(u)) for u in levels ** (1 / samples)])
    return float(np.clip(lengths.median * np.exp(lengths.sigma * z), 1, lengths.longest).mean())
