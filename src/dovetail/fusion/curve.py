"""Reads values between measured points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def interpolate(at: float, points: Sequence[float], values: Sequence[float]) -> float:
    """The value at `at`, on straight lines between the points, which rise. Outside of them it is that of the nearest
    one."""
    right = bisect_right(points, at)
    if right == 0 or right == len(points):
        return float(values[max(0, right - 1)])
    left = right - 1
    slope = (values[right] - values[left]) / (points[right] - points[left])
    return float(slope * (at - points[left]) + values[left])
