"""Decides which instance gets a sample, from loads and speeds. Pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence

# Measured speeds this close to the mean count as equal: noise must not unbalance like servers.
TOLERANCE = 0.25
SMOOTHING = 0.1
# Measurements (of a quarter of a second) after which a difference counts for half: a busy machine's processes run
# unevenly for moments, a slower device always.
BELIEF = 10
MIN_INTERVAL_SECONDS = 0.1


class Speeds:
    """Tokens per second of one request on each instance, smoothed.

    A step takes longer with more requests, so instances are compared only where they ran about the same number."""

    def __init__(self) -> None:
        self._speeds: dict[int, dict[str, float]] = {}
        self._counts: Counter[str] = Counter()

    def measured(self, name: str, tokens: int, streams: int, seconds: float) -> None:
        """Add a measurement: `streams` concurrent requests gave `tokens` tokens in `seconds`."""
        if streams < 1 or tokens < 1 or seconds < MIN_INTERVAL_SECONDS:
            return
        now = tokens / (streams * seconds)
        speeds = self._speeds.setdefault(int(2 * math.log2(streams)), {})
        self._counts[name] += 1
        speeds[name] = now + (1 - SMOOTHING) * (speeds.get(name, now) - now)

    def relative(self, names: Sequence[str]) -> dict[str, float]:
        """Each speed divided by the mean. It is nearer to 1 the less is known, and 1 if it is unknown or near the
        mean."""
        ratios: dict[str, list[float]] = {n: [] for n in names}
        for speeds in self._speeds.values():
            here = {n: speeds[n] for n in names if n in speeds}
            mean = sum(here.values()) / max(1, len(here))
            for n, speed in here.items():
                if len(here) > 1:
                    ratios[n].append(speed / mean)
        means = {n: sum(r) / len(r) if r else 1.0 for n, r in ratios.items()}
        known = min((self._counts[n] for n in names if ratios[n]), default=0)
        means = {n: 1 + (r - 1) * known / (known + BELIEF) for n, r in means.items()}
        return {n: 1.0 if abs(r - 1) <= TOLERANCE else r for n, r in means.items()}


def place(count: int, loads: Mapping[str, int], speeds: Mapping[str, float], capacity: int) -> list[str]:
    """Instances for `count` more requests. Each request goes to the instance that has the least load for its speed.
    The list is shorter if all are full. `loads`: requests on each candidate. `capacity`: the most requests on one
    instance."""
    heap = [((load + 1) / speeds[n], n, load + 1) for n, load in loads.items() if load < capacity]
    heapq.heapify(heap)
    placed: list[str] = []
    while heap and len(placed) < count:
        _, name, load = heapq.heappop(heap)
        placed.append(name)
        if load < capacity:
            heapq.heappush(heap, ((load + 1) / speeds[name], name, load + 1))
    return placed


def excess(loads: Mapping[str, int], newcomers: Sequence[str], capacity: int) -> dict[str, int]:
    """How many requests to take from each instance, so that idle `newcomers` get an even share of all requests."""
    everyone = len(set(loads) | set(newcomers))
    share = -(-sum(loads.values()) // max(1, everyone))
    room = min(share, capacity) * len(newcomers)
    taken: dict[str, int] = {}
    for name in sorted(loads, key=lambda n: (-loads[n], n)):
        if name in newcomers:
            continue
        n = min(max(0, loads[name] - share), room)
        room -= n
        if n:
            taken[name] = n
    return taken
