"""The three kinds of record that training needs, from any file format, and their fields as JSON values."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dovetail.coordinator.data.data_error import DataError
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import Stage

STAGE_OF: dict[DataKind, Stage] = {
    "demonstrations": Stage.SFT,
    "preferences": Stage.REWARD,
    "prompts": Stage.PPO,
}


class Rendered(str):
    """A text that has its special tokens, because a chat template wrote it. To other texts the tokenizer adds them.
    `messages` has what a prompt was written from."""

    __slots__ = ("messages",)

    def __new__(cls, text: str, messages: Sequence[Mapping[str, Any]] = ()) -> Rendered:
        made = super().__new__(cls, text)
        made.messages = messages
        return made

    messages: Sequence[Mapping[str, Any]]


def like(text: str, part: str) -> str:
    """`part` as a text of the same kind as `text`, which is rendered or not."""
    return Rendered(part) if isinstance(text, Rendered) else part


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One text for SFT. `learnt` has the (start, end) of each learnt part in characters, in order. The last part ends
    the text. A rendered text has its end token."""

    text: str
    learnt: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, prompt: str, response: str) -> Demonstration:
        """A prompt and a response, of which the response is learnt."""
        return cls(like(prompt, prompt + response), ((len(prompt), len(prompt) + len(response)),))

    @property
    def prompt(self) -> str:
        """The text before the first learnt part."""
        return like(self.text, self.text[: self.learnt[0][0]])

    @property
    def response(self) -> str:
        """The first learnt part."""
        return self.text[slice(*self.learnt[0])]

    def parts(self) -> Iterator[tuple[str, bool]]:
        """Yields each part of the text after the prompt, and whether it is learnt."""
        at = self.learnt[0][0]
        for start, end in self.learnt:
            if at < start:
                yield self.text[at:start], False
            yield self.text[start:end], True
            at = end


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


# Values that tables can hold and JSON cannot. A datetime is also a date, so it comes first.
_NAMES: Mapping[type, str] = {
    datetime.datetime: "a timestamp",
    datetime.date: "a date",
    datetime.time: "a time",
    datetime.timedelta: "a duration",
    bytes: "bytes",
    decimal.Decimal: "a decimal number",
}


def plain_fields(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields, with null instead of numbers that are not finite, because JSON has no such numbers. Raises DataError
    for a field that JSON cannot hold. Its message begins with `where`."""
    return {name: _plain(value, name, where) for name, value in fields.items()}


def _plain(value: Any, name: str, where: str) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(each, name, where) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each, name, where) for key, each in value.items()}
    known = (what for kind, what in _NAMES.items() if isinstance(value, kind))
    what = next(known, f"of type {type(value).__name__}")
    raise DataError(f"{where}: field {name!r} is {what}; make it text")
