"""Conversations in records: lists of messages, and which of their turns are learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.records import Demonstration, LaterTurn
from dovetail.coordinator.data.text.chat_template import ASSISTANTS, ChatFormat, Message

_HEARD = ("user", "human", "system")
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation. `learnt`: for each message, whether it is learnt. That is an assistant's message
    without the mark "train": false or "weight": 0."""

    messages: list[Message]
    learnt: list[bool]

    def __add__(self, other: Conversation) -> Conversation:
        return Conversation(self.messages + other.messages, self.learnt + other.learnt)

    @property
    def answered(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self.messages) and self.messages[-1]["role"] in ASSISTANTS

    def unlearnt(self) -> Conversation:
        """The same conversation as context: none of its messages is learnt."""
        return Conversation(self.messages, [False] * len(self.messages))


def conversation(value: Any, name: str, where: str) -> Conversation:
    """The messages of field `name`, with roles user, assistant and system. Raises DataError whose message begins with
    `where`."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: field {name!r} must be a list of messages, not {type_name(value)}")
    messages: list[Message] = []
    learnt: list[bool] = []
    for i, item in enumerate(value):
        role = item.get("role", item.get("from")) if isinstance(item, Mapping) else None
        content = _content(item) if isinstance(item, Mapping) else None
        place = f"{where}: message {i} of field {name!r}"
        if isinstance(item, Mapping) and item.get("tool_calls"):
            raise DataError(f"{place} calls a tool, but tools are not supported; remove the record")
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{place} needs 'role' and 'content', both strings")
        if role not in _HEARD and role not in ASSISTANTS:
            raise DataError(f"{place} has role {role!r}; use system, user or assistant")
        messages.append({"role": _ROLES.get(role, role), "content": content})
        learnt.append(role in ASSISTANTS and _marked(item, place))
    return Conversation(messages, learnt)


def _content(item: Mapping[str, Any]) -> Any:
    """What a message says. It may be a list of parts, as in OpenAI's format; those of text are put together."""
    content = item.get("content", item.get("value"))
    if not isinstance(content, list) or not content:
        return content
    parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in parts if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(content) else content


def _marked(item: Mapping[str, Any], place: str) -> bool:
    """Whether the marks of a message allow learning it. A table has null in a record without a mark."""
    for name, kinds, allowed in (("train", (bool,), (True, False)), ("weight", (int, float), (0, 1))):
        mark = item.get(name)
        if mark is None:
            continue
        if not isinstance(mark, kinds) or mark not in allowed:
            choices = "true or false" if name == "train" else "0 or 1"
            raise DataError(f"{place} has {name} {mark!r}, but it must be {choices}")
        if not mark:
            return False
    return True


def demonstration(dialogue: Conversation, name: str, chat: ChatFormat, where: str) -> Demonstration:
    """The demonstration that SFT learns from a conversation: every assistant turn that is marked to be learnt. The text
    after the last of these turns is left out. Raises DataError."""
    messages = dialogue.messages
    turns = [i for i, learnt in enumerate(dialogue.learnt) if learnt]
    if not dialogue.answered:
        raise DataError(f"{where}: the last of field {name!r} must be an assistant message, for it is what SFT learns")
    if not turns:
        raise DataError(f"{where}: no message of field {name!r} is learnt; leave train or weight out of one at least")
    last = turns[-1]
    text = chat.prompt(messages[:last])
    given: list[str] = []
    responses: list[str] = []
    end = 0
    for i in turns[:-1]:
        before = chat.prompt(messages[:i])
        said = messages[i]["content"]
        rest = text[len(before) :] if text.startswith(before) else ""
        length = chat.turn_length(messages[:i], said, rest)
        if length is None:
            raise DataError(
                f"{where}: message {i} of field {name!r} is not in the text of the whole conversation, because the "
                'tokenizer\'s chat template rewrites earlier turns; mark it with "train": false'
            )
        given.append(text[end : len(before)])
        end = len(before) + length
        responses.append(text[len(before) : end])
    given.append(text[end:])
    responses.append(chat.reply(messages[:last], messages[last]["content"]))
    return Demonstration(given[0], responses[0], tuple(map(LaterTurn, given[1:], responses[1:])))


def type_name(value: Any) -> str:
    """The JSON name of the value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
