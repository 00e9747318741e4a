"""One sample of a PPO iteration, as others see it, and what may become of it.

pending -> generating -> generated -> scored -> in_batch -> trained
              |  ^ migrating: its stream is being ended, to be continued elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.store.database import StoreError

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


class State(StrEnum):
    PENDING = "pending"
    GENERATING = "generating"
    MIGRATING = "migrating"
    GENERATED = "generated"
    SCORED = "scored"
    IN_BATCH = "in_batch"
    TRAINED = "trained"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.GENERATING}),
    State.GENERATING: frozenset({State.PENDING, State.MIGRATING, State.GENERATED}),
    State.MIGRATING: frozenset({State.PENDING, State.GENERATING, State.GENERATED}),
    State.GENERATED: frozenset({State.SCORED}),
    State.SCORED: frozenset({State.IN_BATCH}),
    State.IN_BATCH: frozenset({State.TRAINED}),
    State.TRAINED: frozenset(),
}
ORDER = (State.GENERATED, State.SCORED, State.IN_BATCH, State.TRAINED)


class IllegalTransition(StoreError):
    """A sample was asked to go where it cannot go from its state."""


class Key(NamedTuple):
    iteration: int
    prompt: int
    sample: int


@dataclass(frozen=True)
class NewSample:
    """`prompt_tokens` (P,) token ids. `seed`: 0 <= seed < 2**63. `fields`: the prompt record's other fields, JSON."""

    prompt: int
    sample: int
    prompt_tokens: Sequence[int] | Tokens
    seed: int
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """`tokens` (R,) int32 and `logprobs` (R,) float32: the response so far, or whole from `generated` on.

    `instance`, `incarnation`, `attempt`: latest assignment. `first_version` and `weight_version`: weights of the first
    kept token and of the latest assignment (equal unless weights changed in between)."""

    key: Key
    state: State
    prompt_tokens: Tokens
    seed: int
    fields: dict[str, Any]
    tokens: Tokens
    logprobs: Floats
    attempt: int = 0
    instance: str | None = None
    incarnation: str | None = None
    first_version: int | None = None
    weight_version: int | None = None
    finish_reason: str | None = None
    ref_logprobs: Floats | None = None
    values: Floats | None = None
    reward: float | None = None
    critic_version: int | None = None

    @property
    def finished(self) -> bool:
        """Ended by an end token or stop string, not by its length."""
        return self.finish_reason == "stop"


@dataclass(frozen=True)
class Assignment:
    """Give a sample to an instance, keeping its first `keep` response tokens (fewer than stored: the rest is
    generated again, as stop strings across the cut need)."""

    key: Key
    instance: str
    incarnation: str
    weight_version: int | None
    keep: int


@dataclass(frozen=True)
class Delta:
    """Response tokens from position `start` on, streamed for assignment `attempt`; `finish_reason` with the last."""

    key: Key
    attempt: int
    start: int
    tokens: Sequence[int] | Tokens
    logprobs: Sequence[float] | Floats
    finish_reason: str | None = None


@dataclass(frozen=True)
class ScoreRow:
    """`ref_logprobs` and `values` (R,) float32, each None where not wanted; `reward` in the units of the scorer."""

    key: Key
    ref_logprobs: Floats | None
    values: Floats | None
    reward: float | None
    critic_version: int | None = None
