"""Length-balanced partition: Karmarkar and Karp's largest differencing method (1982), k-way."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

_Bin = tuple[float, list[int]]


def partition(lengths: Sequence[float], k: int, equal_counts: bool = False) -> list[list[int]]:
    """Split items into k groups with nearly equal sums of `lengths`; returns each group's indices, ascending.

    `equal_counts`: group sizes also differ by at most one. Deterministic: ties go to the lower index; groups
    come ordered by their smallest index, empty ones last. O(n k log k). Raises ValueError for k < 1, for a
    negative length, and, with `equal_counts`, for fewer items than groups."""
    if k < 1:
        raise ValueError(f"cannot partition into {k} groups")
    if any(length < 0 for length in lengths):
        raise ValueError("lengths must not be negative")
    n = len(lengths)
    if equal_counts and n < k:
        raise ValueError(f"cannot give each of {k} groups one of {n} items")
    order = sorted(range(n), key=lambda i: (-lengths[i], i))
    # A state is k bins, heaviest first; its spread is what differencing shrinks.
    states: list[list[_Bin]] = []
    width = k if equal_counts else 1
    for start in range(0, n, width):
        bins: list[_Bin] = [(lengths[i], [i]) for i in order[start : start + width]]
        states.append(bins + [(0, []) for _ in range(k - len(bins))])
    heap = [(-(bins[0][0] - bins[-1][0]), serial, bins) for serial, bins in enumerate(states)]
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda b: (-b[0], min(b[1], default=n)))
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), serial, merged))
        serial += 1
    groups = [sorted(b[1]) for b in heap[0][2]] if heap else [[] for _ in range(k)]
    return sorted(groups, key=lambda g: g[0] if g else n)
