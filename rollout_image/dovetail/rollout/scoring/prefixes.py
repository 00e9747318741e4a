"""Keeps a scorer's results for samples that are still generated. These are the keys and values of their tokens so far,
and the scores of these tokens.

A prefix is found by its tokens, so it does not matter who sent it, or when. If a prefix is dropped, its sample is
scored from its first token on. This costs time, but gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.models.layers.packing import KVCache
from dovetail.protocol.budgets import RESPONSE_BLOCK

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class SeenTokens:
    """One model's results for a prefix. The model has processed the prompt and `held` response tokens, a multiple of
    `RESPONSE_BLOCK`. `outputs` (held + 1,) float32 are the outputs for response tokens 0 to `held`, or None if no
    outputs are wanted. `temperature` is that of these outputs."""

    cache: KVCache
    held: int
    outputs: NDArray[np.float32] | None
    temperature: float


@dataclass(eq=False)
class Prefix:
    """A sample's beginning. `prompt` (P,) and `response` (R,) are the tokens that were sent. `models` has the results
    of each model, by its name."""

    prompt: Tokens
    response: Tokens
    models: dict[str, SeenTokens] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The largest number of tokens that a model keeps."""
        return len(self.prompt) + max((seen.held for seen in self.models.values()), default=0)

    def begins(self, prompt: Tokens, response: Tokens) -> bool:
        """Whether the sample begins with this prefix and has more tokens than any model has processed."""
        mine = self.response
        return (
            len(mine) <= len(response)
            and np.array_equal(self.prompt, prompt)
            and bool((response[: len(mine)] == mine).all())
        )


def held_of(response: int) -> int:
    """The number of an unfinished sample's `response` tokens that the models process. They process whole blocks, and
    never the last token."""
    return max(0, response - 1) // RESPONSE_BLOCK * RESPONSE_BLOCK


class Prefixes:
    """Keeps at most `room` tokens of prompts and responses. If there is no room, the prefix that was not used for the
    longest time is dropped."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._kept: list[Prefix] = []

    @property
    def tokens(self) -> int:
        return sum(prefix.tokens for prefix in self._kept)

    def find(self, prompt: Tokens, response: Tokens) -> Prefix | None:
        """The longest prefix that the sample begins with."""
        found = [prefix for prefix in self._kept if prefix.begins(prompt, response)]
        return max(found, key=lambda prefix: len(prefix.response), default=None)

    def keep(self, new: Sequence[Prefix]) -> None:
        """Mark these prefixes as just used, the last one as the newest. Prefixes without room are dropped."""
        kept = [prefix for prefix in self._kept if prefix not in new]
        self._kept = [*kept, *new]
        while self.tokens > self.room:
            self._kept.pop(0)

    def drop(self, prefix: Prefix) -> None:
        if prefix in self._kept:
            self._kept.remove(prefix)

    def forget(self, model: str | None = None) -> None:
        """Drop the results of one model, because its weights change. With None drop everything."""
        for prefix in self._kept:
            if model is not None:
                prefix.models.pop(model, None)
        self._kept = [] if model is None else [prefix for prefix in self._kept if prefix.models]
