"""Finds the token ids that come after a turn of the model. What the model read and wrote is never encoded again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from dovetail.coordinator.data.records import Rendered
from dovetail.coordinator.data.text.chat_template import ChatFormat, Message

Tools = Sequence[Mapping[str, Any]]


class UnknownToken(Exception):
    """A prompt has a token that the tokenizer does not know. The message is a sentence."""


class Bridge:
    """A chat format with its tokenizer.

    A template may leave earlier thoughts out, or write an earlier turn otherwise, once other messages follow. So for
    each turn the bridge compares the texts before and after it. Only a text that goes on as it was is appended to."""

    def __init__(self, chat: ChatFormat, tokenizer: Any) -> None:
        self._chat, self._tokenizer = chat, tokenizer

    def opening(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The ids of a prompt that begins a branch. Raises TemplateRefused or NotWritten."""
        return self._ids(self._with(tools).prompt(messages))

    def appended(
        self, messages: Sequence[Message], turn: int, tools: Tools, sampled: Sequence[int]
    ) -> list[int] | None:
        """The ids to append to the `sampled` ones of the assistant's `turn`, the last of which ends it, so that the
        assistant can answer `messages`. None if the template cannot append to this turn. Raises TemplateRefused or
        NotWritten."""
        last = int(sampled[-1])
        if last not in self._marks:
            return None
        end = str(self._tokenizer.convert_ids_to_tokens(last))
        found = self._with(tools).following(messages, turn, end)
        if found is None:
            return None
        written, text = found
        # The template may write a call in other words than the model, but it has the same parts: thoughts, calls, end.
        if self._parts(self._ids(Rendered(written))) != self._parts(sampled):
            return None
        # Some tokenizers write the beginning of a text otherwise than its middle. Here it comes after the end token.
        first, *rest = self._ids(Rendered(end + text))
        return rest if first == last else None

    def given(self, ids: Sequence[int]) -> str:
        """What the ids say that an agent wrote. Raises UnknownToken: the tokenizer would leave such an id out, and a
        server refuse it."""
        if (highest := max(ids, default=0)) >= (known := len(self._tokenizer)):
            raise UnknownToken(f"token_ids has {highest}, but the tokenizer's ids end at {known - 1}")
        return self.text(ids)

    def text(self, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        """What sampled ids say before any of `stops`, without marks such as the end token."""
        return before_any(self._decoded(ids), stops).strip()

    def until(self, ids: Sequence[int], stops: Sequence[str]) -> int | None:
        """How many of the ids it takes to write one of `stops`. None if none is written."""

        def written(count: int) -> bool:
            text = self._decoded(ids[:count])
            return any(stop in text for stop in stops)

        return bisect_left(range(len(ids)), True, key=written) if written(len(ids)) else None

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def _marks(self) -> frozenset[int]:
        """The tokens that are no text, such as those that end a turn and open a call."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    def _parts(self, ids: Sequence[int]) -> list[int]:
        return [each for each in ids if each in self._marks]

    def _with(self, tools: Tools) -> ChatFormat:
        return self._chat.with_tools(tools) if tools else self._chat

    def _ids(self, text: str) -> list[int]:
        special = not isinstance(text, Rendered)
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])


def before_any(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of `stops` in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
