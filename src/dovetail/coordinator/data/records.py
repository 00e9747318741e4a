"""The three kinds of record that training needs, from any file format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import Stage

STAGE_OF: dict[DataKind, Stage] = {
    "demonstrations": Stage.SFT,
    "preferences": Stage.REWARD,
    "prompts": Stage.PPO,
}


@dataclass(frozen=True, slots=True)
class LaterTurn:
    """A later turn of a conversation. `given` is the text before it, and `response` is the assistant's text."""

    given: str
    response: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation for SFT. The text is `prompt + response`, and then `given + response` for each of `turns`. Only
    responses are learnt."""

    prompt: str
    response: str
    turns: tuple[LaterTurn, ...] = ()

    @property
    def text(self) -> str:
        """The whole text, without an end-of-sequence token."""
        return self.prompt + self.response + "".join(turn.given + turn.response for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, of which `chosen` is better."""

    prompt: str
    chosen: str
    rejected: str


def equal_pairs(equal: int, of: str) -> str:
    """A warning that `equal` pairs have equal replies. `of` says in words how many pairs were looked at."""
    return (
        f"{equal:,} of {of} have equal replies, perhaps because both are cut at maxTokens; nothing is learnt from them"
    )


@dataclass(frozen=True, slots=True)
class Labelled:
    """One response to a prompt, and whether it is good."""

    prompt: str
    response: str
    good: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `fields` has the record's other fields, which reward functions get."""

    prompt: str
    fields: dict[str, Any] = field(default_factory=dict)


Judged = Preference | Labelled
Record = Demonstration | Judged | Prompt
R_co = TypeVar("R_co", covariant=True)


class Records(Protocol[R_co]):
    """Records by position. Files of any size stay on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> R_co: ...


@dataclass(frozen=True)
class ByIndex:
    """Records that a function of the position makes on demand."""

    size: int
    make: Callable[[int], Record]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Record:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.make(index)
