"""Length-balanced partition with the largest differencing method of Karmarkar and Karp (1982), for k groups."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

# The sum, the smallest index, and the indices as a binary tree. With a tree, two bins are joined in one step, without a
# copy.
_Tree = Any
_Bin = tuple[float, int, _Tree]


def _leaves(tree: _Tree) -> list[int]:
    result, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif node is not None:
            result.append(node)
    return sorted(result)


def _join(a: _Bin, b: _Bin) -> _Bin:
    if a[2] is None or b[2] is None:
        return b if a[2] is None else a
    return a[0] + b[0], min(a[1], b[1]), (a[2], b[2])


def partition(lengths: Sequence[float], k: int, equal_counts: bool = False) -> list[list[int]]:
    """Split items into k groups with nearly equal sums of `lengths`. Returns each group's indices, ascending.

    With `equal_counts` group sizes also differ by at most one. The result is deterministic. Ties go to the lower index.
    Groups are ordered by their smallest index, and empty ones come last. It takes O(n k log k) steps. Raises ValueError
    for k < 1, for a negative length, and, with `equal_counts`, for fewer items than groups."""
    if k < 1:
        raise ValueError(f"cannot partition into {k} groups")
    if any(length < 0 for length in lengths):
        raise ValueError("lengths must not be negative")
    n = len(lengths)
    if equal_counts and n < k:
        raise ValueError(f"cannot give each of {k} groups one of {n} items")
    order = sorted(range(n), key=lambda i: (-lengths[i], i))
    # A state is k bins, heaviest first. Its spread is the heaviest sum less the lightest. Differencing makes it
    # smaller.
    states: list[list[_Bin]] = []
    width = k if equal_counts else 1
    for start in range(0, n, width):
        bins: list[_Bin] = [(lengths[i], i, i) for i in order[start : start + width]]
        states.append(bins + [(0, n, None)] * (k - len(bins)))
    heap = [(-(bins[0][0] - bins[-1][0]), serial, bins) for serial, bins in enumerate(states)]
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [_join(a, b) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda b: (-b[0], b[1]))
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), serial, merged))
        serial += 1
    groups = [_leaves(tree) for _, _, tree in heap[0][2]] if heap else [[] for _ in range(k)]
    return sorted(groups, key=lambda g: g[0] if g else n)
