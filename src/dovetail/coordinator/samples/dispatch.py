"""Decides which instance gets a sample, from loads and speeds. It does no I/O."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence

# Measured speeds that differ from the mean by at most this fraction count as equal. So noise does not unbalance equal
# servers.
TOLERANCE = 0.25
SMOOTHING = 0.1
# After this many measurements, of a quarter of a second each, a difference counts for half. On a busy machine processes
# run unevenly for moments, but a slower device is always slower.
BELIEF = 10
MIN_INTERVAL_SECONDS = 0.1


class Speeds:
    """The tokens per second of one request on each instance, smoothed.

    A decode step takes longer with more requests. So instances are compared only where they ran about the same number
    of requests."""

    def __init__(self) -> None:
        self._speeds: dict[int, dict[str, float]] = {}
        self._counts: Counter[str] = Counter()

    def measured(self, name: str, tokens: int, streams: int, seconds: float) -> None:
        """Add a measurement: `streams` concurrent requests generated `tokens` tokens in `seconds`."""
        if streams < 1 or tokens < 1 or seconds < MIN_INTERVAL_SECONDS:
            return
        now = tokens / (streams * seconds)
        speeds = self._speeds.setdefault(int(2 * math.log2(streams)), {})
        self._counts[name] += 1
        speeds[name] = now + (1 - SMOOTHING) * (speeds.get(name, now) - now)

    def relative(self, names: Sequence[str]) -> dict[str, float]:
        """The speed of each instance divided by the mean speed. With few measurements it is closer to 1. It is 1 if it
        is unknown or close to the mean."""
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
    """Choose instances for `count` more requests. Each request goes to the instance with the lowest load relative to
    its speed. The list is shorter than `count` if all instances are full. `loads` has the number of requests on each
    candidate. `capacity` is the maximum number of requests on one instance."""
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
    """The number of requests to move away from each instance, so that the idle `newcomers` get an equal share of all
    requests."""
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
