"""How much of a response goes along when its sample goes on elsewhere, so that it ends where it would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens that are looked at to tell whether the last character is whole: it has four bytes at most.
WINDOW = 8
INCOMPLETE = "\ufffd"


class Cut:
    """`stop`: the job's stop strings. `decode`: text of tokens.

    A server looks for stop strings in the text of what it generates itself. So one that lies across the cut would be
    missed: as many tokens as it has bytes, less one, are made again, and come out the same. And a server that begins
    within a character takes all text up to that character's end for its own, the prompt's too, and would end the
    response at a stop string of the prompt: the cut is moved to where a character ends."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self._rewind = max((len(s.encode()) - 1 for s in stop), default=0)
        self._decode = decode if stop else None

    def keep(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of the response's tokens so far are kept: all of them in a job without stop strings."""
        keep = max(0, len(tokens) - self._rewind)
        if self._decode is not None:
            before = list(prompt[-WINDOW:])
            while keep and self._decode([*before, *tokens[:keep]][-WINDOW:]).endswith(INCOMPLETE):
                keep -= 1
        return keep
