"""Response lengths to expect: a log-normal prior, then those of recent iterations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# RLHFuse figure 2: the 99.9th percentile is about ten times the median, for models of every size; it is where the
# limit on tokens should lie.
TAIL_RATIO = 10.0
TAIL_QUANTILE = 0.999
RECENT_ITERATIONS = 5


def prior(count: int, max_tokens: int, rng: np.random.Generator) -> Ints:
    """`count` log-normal lengths, cut off at `max_tokens`."""
    sigma = math.log(TAIL_RATIO) / NormalDist().inv_cdf(TAIL_QUANTILE)
    lengths = max_tokens / TAIL_RATIO * np.exp(sigma * rng.standard_normal(count))
    return np.clip(np.rint(lengths), 1, max_tokens).astype(np.int64)


class LengthHistory:
    """The last few iterations' response lengths."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._recent: deque[list[int]] = deque(maxlen=RECENT_ITERATIONS)

    def observe(self, lengths: Sequence[int]) -> None:
        if len(lengths):
            self._recent.append([int(n) for n in lengths])

    @property
    def iterations(self) -> int:
        return len(self._recent)

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """`count` lengths with replacement, of those measured, or else of the prior."""
        if not self._recent:
            return prior(count, self._max_tokens, rng)
        return rng.choice(np.concatenate([np.asarray(r) for r in self._recent]), count)

    def as_json(self) -> list[list[int]]:
        return list(self._recent)

    def restore(self, recent: Sequence[Sequence[int]]) -> None:
        self._recent.clear()
        self._recent.extend([int(n) for n in lengths] for lengths in recent)
