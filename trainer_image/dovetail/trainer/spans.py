"""Records spans of this rank's work for the timeline of an iteration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dovetail.protocol.messages import Span
from dovetail.protocol.process.pulse import PROGRESS

# An iteration of a large job has thousands of actions. A result must stay small, and the first spans are enough.
MAX_SPANS = 2000


class SpanRecorder:
    """Collects spans until `take`. `clock` gives seconds since the epoch."""

    def __init__(self, process: str, clock: Callable[[], float] = time.time, limit: int = MAX_SPANS) -> None:
        self._process, self._clock, self._limit = process, clock, limit
        self._spans: list[Span] = []

    def record(self, name: str, start: float, end: float, lane: str = "actions") -> None:
        """Add one span from `start` to `end` (seconds since the epoch). Spans beyond the limit are dropped."""
        PROGRESS.made()
        if len(self._spans) < self._limit:
            self._spans.append(Span(name=name, process=self._process, lane=lane, start=start, end=end))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a span around a block, on the lane `phases`."""
        start = self._clock()
        try:
            yield
        finally:
            self.record(name, start, self._clock(), "phases")

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans
