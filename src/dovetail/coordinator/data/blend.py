"""Decides which records a stage uses, and in which order. It is DeepSpeed-Chat's data abstraction as pure functions of
the seed. (DeepSpeed-Chat, arXiv 2308.01320.)

The records of each source are shuffled and split into disjoint parts for the stages (`split`). A share of each part is
held out, and the rest is blended by weight (`Blend`). A batch depends only on (seed, step), so a job can resume from
any step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.seeds import derived_seed

Indices = NDArray[np.int64]


def permutation(size: int, *key: int | str) -> Indices:
    """A permutation of range(size), (size,) int64. It depends only on `size` and the key."""
    return np.random.Generator(np.random.PCG64(derived_seed(*key))).permutation(size).astype(np.int64)


def split(size: int, shares: Mapping[str, float], *key: int | str) -> dict[str, Indices]:
    """Disjoint random parts of range(size), in proportion to `shares`, each (n,) int64. Together they cover the range.
    Each part with a positive share gets at least one record if there are enough. Raises ValueError if no share is
    positive."""
    total = sum(shares.values())
    if total <= 0:
        raise ValueError("no share is positive")
    wanted = [name for name in sorted(shares) if shares[name] > 0]
    order = permutation(size, "split", *key)
    bounds = np.rint(np.cumsum([shares[name] for name in wanted]) / total * size).astype(int)
    if size >= len(wanted):
        for i in range(len(bounds)):  # each part gets at least one, from both ends
            bounds[i] = min(max(bounds[i], (bounds[i - 1] if i else 0) + 1), size - (len(bounds) - 1 - i))
    parts = dict(zip(wanted, np.split(order, bounds[:-1]), strict=True))
    return {name: parts.get(name, np.zeros(0, np.int64)) for name in shares}


def hold_out(part: Indices, share: float) -> tuple[Indices, Indices]:
    """The indices of the records to train on, and of those held out, each (n,) int64. At least one is held out if
    `share` > 0, and at least one is left for training if `share` < 1."""
    count = round(len(part) * share)
    if share > 0:
        count = max(count, 1)
    if share < 1:
        count = min(count, len(part) - 1)
    count = max(count, 0)
    return part[count:], part[:count]


class Blend:
    """An endless sequence of (source, position in source), interleaved in proportion to the weights.

    After n picks, each source has had its share of n, within 1. Each source is read in epochs. An epoch has its own
    order, and has every record once."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *key: int | str) -> None:
        """Raises ValueError for an empty source, because it could not provide its share."""
        if len(sizes) != len(weights) or not sizes:
            raise ValueError("a blend needs one weight for each of at least one source")
        if min(sizes) < 1 or min(weights) <= 0:
            raise ValueError("a blend needs at least one record and a positive weight in every source")
        self.sizes = list(sizes)
        self._key = key
        self._weights = np.asarray(weights, np.float64) / sum(weights)
        self._sources: list[int] = []  # the source of pick n
        self._turns: list[int] = []  # how often that source was picked before
        self._counts = np.zeros(len(sizes), np.int64)
        self._order = lru_cache(maxsize=2 * len(sizes))(
            lambda source, epoch: permutation(self.sizes[source], "epoch", *key, source, epoch)
        )

    def __len__(self) -> int:
        """The number of records of all sources. This is one epoch of the blend if the weights are in proportion to the
        sizes."""
        return sum(self.sizes)

    def pick(self, n: int) -> tuple[int, int]:
        """The n-th pick, counted from 0."""
        source, turn = (0, n) if len(self.sizes) == 1 else self._turn(n)
        epoch, within = divmod(turn, self.sizes[source])
        return source, int(self._order(source, epoch)[within])

    def batch(self, step: int, size: int) -> list[tuple[int, int]]:
        """The `size` picks of a step. Steps count from 1. Raises ValueError for a step below 1."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        return [self.pick(n) for n in range((step - 1) * size, step * size)]

    def _turn(self, n: int) -> tuple[int, int]:
        # The next source is the one furthest below its share, or the first of several equal ones. This rule needs all
        # earlier picks.
        while len(self._sources) <= n:
            lag = self._weights * (len(self._sources) + 1) - self._counts
            source = int(np.argmax(lag))
            self._sources.append(source)
            self._turns.append(int(self._counts[source]))
            self._counts[source] += 1
        return self._sources[n], self._turns[n]
