"""Response lengths to expect: a log-normal prior, then those of recent iterations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from dovetail.planner.workload import Ints, Lengths

RECENT_ITERATIONS = 5


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
            return Lengths.long_tailed(self._max_tokens).draw(count, rng)
        return rng.choice(np.concatenate([np.asarray(r) for r in self._recent]), count)

    def as_json(self) -> list[list[int]]:
        return list(self._recent)

    def restore(self, recent: Sequence[Sequence[int]]) -> None:
        self._recent.clear()
        self._recent.extend([int(n) for n in lengths] for lengths in recent)
