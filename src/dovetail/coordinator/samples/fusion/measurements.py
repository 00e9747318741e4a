"""Builds a `StageProfile` from what a run measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dovetail.fusion.profile import StageProfile

# The weight of a new measurement in the mean of its kind.
SMOOTHING = 0.3
# The factor by which the weight of a measured batch decreases with each later batch.
FADING = 0.98
# Amounts with a smaller relative variance count as equal.
SPREAD = 0.02


class Mean:
    """The mean seconds per amount, as a ratio of two sums. Older measurements count less."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._amount = (1 - SMOOTHING) * self._amount + SMOOTHING * amount
            self._seconds = (1 - SMOOTHING) * self._seconds + SMOOTHING * seconds

    @property
    def seconds_each(self) -> float | None:
        return self._seconds / self._amount if self._amount else None

    @property
    def weight(self) -> float:
        """The amount that was measured recently."""
        return self._amount


class Line:
    """A line fitted to points (amount, seconds). It has fixed seconds, and seconds per amount. Older measurements count
    less.

    If all amounts were equal, the fixed part is unknown. It is then 0. It is also 0 if the fit gives a negative
    value."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weighted sums of 1, x, y, x x, x y

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            new = np.array([1.0, amount, seconds, amount * amount, amount * seconds])
            self._sums = FADING * self._sums + new

    @property
    def fit(self) -> tuple[float, float] | None:
        """(fixed seconds, seconds per amount). None before the first measurement."""
        n, x, y, xx, xy = self._sums
        if not n:
            return None
        spread = n * xx - x * x
        each = (n * xy - x * y) / spread if spread > SPREAD * n * xx else 0.0
        fixed = (y - each * x) / n
        return (float(fixed), float(each)) if each > 0 and fixed > 0 else (0.0, float(y / x))


class Measurements:
    """The measurements of one instance, or of all instances of one kind. Before a value is measured, that of `assumed`
    is used."""

    def __init__(self, assumed: StageProfile) -> None:
        self._assumed = assumed
        self._decode: dict[int, Mean] = {}
        self._prefill, self._inference, self._migration = Mean(), Line(), Line()
        self._swap_in, self._swap_out = Mean(), Mean()

    def decoded(self, batch: int, steps: float, seconds: float) -> None:
        """Add a measurement: `steps` decode steps at a mean batch size took `seconds`. Batch sizes that differ by up to
        a quarter count as equal."""
        if batch >= 1:
            self._decode.setdefault(_bin(batch), Mean()).add(steps, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Add a measurement: `tokens` prompt tokens were sent at once, and the last of them was prefilled after
        `seconds`."""
        self._prefill.add(tokens, seconds)

    def scored(self, tokens: int, seconds: float) -> None:
        """Add a measurement: the reference, reward model and critic took `seconds` for a batch of `tokens` prompt and
        response tokens."""
        self._inference.add(tokens, seconds)

    def swapped_in(self, seconds: float) -> None:
        self._swap_in.add(1, seconds)

    def swapped_out(self, seconds: float) -> None:
        self._swap_out.add(1, seconds)

    def migrated(self, tokens: int, seconds: float) -> None:
        """Add a measurement: samples with `tokens` prompt and response tokens moved at once to be prefilled. `seconds`
        is the time from the decision to move them until the last of them got its next token."""
        self._migration.add(tokens, seconds)

    @property
    def measured(self) -> bool:
        """Whether decoding and inference have both been measured. They decide the result."""
        return bool(self._points()) and self._inference.fit is not None

    def _points(self) -> tuple[tuple[int, float], ...]:
        points = ((batch, mean.seconds_each, mean.weight) for batch, mean in sorted(self._decode.items()))
        return rising([(b, s, w) for b, s, w in points if s is not None])

    def profile(self) -> StageProfile:
        found: dict[str, Any] = {
            "prefill_seconds_per_token": self._prefill.seconds_each,
            "swap_in_seconds": self._swap_in.seconds_each,
            "swap_out_seconds": self._swap_out.seconds_each,
            "decode": self._points() or None,
        }
        if self._inference.fit is not None:
            found["inference_seconds_per_batch"], found["inference_seconds_per_token"] = self._inference.fit
        if self._migration.fit is not None:
            found["migration_seconds"], found["resume_seconds_per_token"] = self._migration.fit
        return replace(self._assumed, **{k: v for k, v in found.items() if v is not None})


def rising(points: Sequence[tuple[int, float, float]]) -> tuple[tuple[int, float], ...]:
    """Turn (batch, seconds, weight) into (batch, seconds) whose seconds never decrease. The result is the closest such
    sequence (isotonic regression).

    A decode step does not get shorter with more samples. One noisy point must not make all larger batches look slow."""
    pools: list[tuple[float, float, list[int]]] = []
    for batch, seconds, weight in points:
        batches = [batch]
        while pools and pools[-1][0] > seconds:
            before, other, earlier = pools.pop()
            seconds = (before * other + seconds * weight) / (other + weight)
            weight, batches = weight + other, earlier + batches
        pools.append((seconds, weight, batches))
    return tuple((batch, seconds) for seconds, _, batches in pools for batch in batches)


def _bin(batch: int) -> int:
    """The largest value of 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 31, ... that is not above `batch`."""
    value = 1
    while (following := max(value + 1, value * 5 // 4)) <= batch:
        value = following
    return value
