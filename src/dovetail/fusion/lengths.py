"""Describes how long samples are, before any is known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from random import Random
from statistics import NormalDist, fmean

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

    def quantiles(self, count: int) -> tuple[int, ...]:
        """The middles of `count` equally likely parts of the distribution, the shortest first. They replace a random
        sample."""
        normal = NormalDist()
        return self.at(normal.inv_cdf((i + 0.5) / count) for i in range(count))

    def draw(self, count: int, rng: Random) -> tuple[int, ...]:
        """A random sample of `count` lengths."""
        return self.at(rng.gauss(0.0, 1.0) for _ in range(count))

    def at(self, deviates: Iterable[float]) -> tuple[int, ...]:
        """The lengths at these deviates of the standard normal distribution."""
        return tuple(round(self.exact(deviate)) for deviate in deviates)

    def exact(self, deviate: float) -> float:
        """The length at a deviate, before it is rounded."""
        return min(max(1.0, self.median * math.exp(self.sigma * deviate)), float(self.longest))

    @cached_property
    def mean(self) -> float:
        """The mean length, in tokens, of 256 quantiles."""
        return fmean(self.quantiles(256))
