"""Describes how long samples are, before any is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
# RLHFuse figure 2: the 99.9th percentile is about ten times the median, for models of every size. The limit on tokens
# is assumed to be there.
TAIL_RATIO = 10.0
TAIL_QUANTILE = 0.999


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of numbers of tokens, cut off at `longest`. With `sigma` 0 all are the median, as
    APP's fixed 256 prompt and 256 response tokens."""

    median: float
    sigma: float
    longest: int

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """A distribution in which all lengths are `tokens`."""
        return cls(float(tokens), 0.0, tokens)

    @classmethod
    def long_tailed(cls, longest: int) -> Lengths:
        """A distribution whose 99.9th percentile is `longest`, ten times the median (RLHFuse figure 2)."""
        return cls(longest / TAIL_RATIO, math.log(TAIL_RATIO) / NormalDist().inv_cdf(TAIL_QUANTILE), longest)

    def quantiles(self, count: int) -> Ints:
        """The middles of `count` equally likely parts of the distribution, (count,) int64, the shortest first. They
        replace a random sample."""
        z = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
        return self._cut(self.median * np.exp(self.sigma * np.array(z)))

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """A random sample of (count,) int64 lengths."""
        return self._cut(self.median * np.exp(self.sigma * rng.standard_normal(count)))

    @cached_property
    def mean(self) -> float:
        """The mean length, in tokens, of 256 quantiles."""
        return float(self.quantiles(256).mean())

    def _cut(self, tokens: npt.NDArray[np.float64]) -> Ints:
        return np.clip(np.rint(tokens), 1, self.longest).astype(np.int64)
