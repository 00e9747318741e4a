"""Samples that leave a server and continue on another one. It decides which of their tokens are kept, and records the
moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.workers.fleet import Instance

# The last tokens, this many of them, show whether the last character is complete. A character has at most four bytes.
WINDOW = 8
INCOMPLETE = "\ufffd"


class StopStrings:
    """Decides which tokens a sample keeps when it moves. `stop` has the job's stop strings. `decode` returns the text
    of tokens.

    A server looks for stop strings only in the text that it generates itself. It would miss a stop string that began on
    the old server. So the last tokens are generated again, as many as the longest stop string has bytes, less one. The
    result is the same. A server that begins within a character treats all text up to the end of that character as its
    own, even the prompt's text. It would then end the response at a stop string of the prompt. So a response is cut
    only where a character ends."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self._rewind = max((len(s.encode()) - 1 for s in stop), default=0)
        self._decode = decode if stop else None

    def kept(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """The number of the response's tokens that are kept. A job without stop strings keeps all."""
        keep = max(0, len(tokens) - self._rewind)
        if self._decode is not None:
            before = list(prompt[-WINDOW:])
            while keep and self._decode([*before, *tokens[:keep]][-WINDOW:]).endswith(INCOMPLETE):
                keep -= 1
        return keep


@dataclass(frozen=True)
class Leave:
    """A sample left its server at `time` (monotonic seconds). If the request was ended on purpose, `reason` is tail,
    drain, newcomer, suspect or older (an older iteration needs the server). It is failure if the request failed."""

    instance: str
    reason: str
    time: float


@dataclass(frozen=True)
class Migration:
    """A sample that continued on another server. `mechanism` is tokens or kv. `tokens` is the number of prompt and
    response tokens, and `nbytes` bytes were sent. The first new token came `seconds` after the decision, at `ended` in
    seconds since the epoch."""

    key: Key
    source: str
    destination: str
    mechanism: str
    reason: str
    tokens: int
    nbytes: int
    seconds: float
    ended: float

    def fields(self) -> dict[str, Any]:
        """The fields for the event log."""
        return {
            "sample": list(self.key),
            "instance": self.destination,
            "tokens": self.tokens,
            "source": self.source,
            "mechanism": self.mechanism,
            "reason": self.reason,
            "seconds": round(self.seconds, 4),
        }


@dataclass(frozen=True)
class Departure:
    """The place where a sample's KV cache was left. It has the server, the key, the version of the weights, and the
    time (monotonic seconds)."""

    source: Instance
    key: str
    weights: int
    time: float
