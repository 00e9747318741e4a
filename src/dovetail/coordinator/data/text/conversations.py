"""Reads conversations from records. A conversation is a list of messages, and some of its turns are learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.records import Demonstration
from dovetail.coordinator.data.text.chat_template import ASSISTANTS, REASONING, ChatFormat, Message

# The fields of a message that every format reads.
SAID = {"role", "content", "from", "value", "train", "weight"}
# The other fields of a message that templates read.
FURTHER = ("name", "tool_calls", "tool_call_id", *REASONING)
# A message with one of these roles is a call of a tool, as a text.
_CALLING = ("function_call", "tool_call")
# Other names of the roles. Those of ShareGPT's records are as LLaMA-Factory and ms-swift read them, and `function` is
# OpenAI's old name.
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    **dict.fromkeys(_CALLING, "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function"), "tool"),
}


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation. `learnt` says for each message whether it is learnt. An assistant's message is
    learnt unless it has the mark "train": false or "weight": 0."""

    messages: list[Message]
    learnt: list[bool]

    def __add__(self, other: Conversation) -> Conversation:
        return Conversation(self.messages + other.messages, self.learnt + other.learnt)

    @property
    def answered(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self.messages) and self.messages[-1]["role"] in ASSISTANTS

    def unlearnt(self) -> Conversation:
        """The same conversation as context, so that none of its messages is learnt."""
        return Conversation(self.messages, [False] * len(self.messages))


def conversation(value: Any, name: str, where: str) -> Conversation:
    """The messages of field `name`, with roles user, assistant, system and tool. Raises DataError whose message begins
    with `where`."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: field {name!r} must be a list of messages, not {type_name(value)}")
    messages: list[Message] = []
    learnt: list[bool] = []
    for i, item in enumerate(value):
        role = item.get("role", item.get("from")) if isinstance(item, Mapping) else None
        content = _content(item) if isinstance(item, Mapping) else None
        place = f"{where}: message {i} of field {name!r}"
        # OpenAI's old name. There "auto" and "none" are options of a request.
        called = item.get("function_call") if isinstance(item, Mapping) else None
        if called and called not in ("auto", "none") and not item.get("tool_calls"):
            item = {**item, "tool_calls": [{"type": "function", "function": called}]}
        if isinstance(item, Mapping) and content is None and item.get("tool_calls"):
            content = ""  # null beside calls, as in OpenAI's API
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{place} needs 'role' and 'content', both strings")
        if role not in _ROLES:
            raise DataError(f"{place} has role {role!r}; use system, user, assistant or tool")
        if role in _CALLING:
            item, content = {**item, "tool_calls": _calls(content, role, place)}, ""
        role = _ROLES[role]
        messages.append({"role": role, "content": content, **_further(item, place)})
        learnt.append(role in ASSISTANTS and _marked(item, place))
    return Conversation(messages, learnt)


def _further(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The other fields of a message, which are not its content. Templates want the arguments of a call as an object,
    but OpenAI's API writes this object as a text."""
    further = {name: item[name] for name in FURTHER if item.get(name)}
    calls = further.get("tool_calls")
    if calls is None:
        return further
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{place} must have a list of objects in 'tool_calls'")
    parsed = [_parsed(call) for call in calls]
    for function in (call.get("function", call) for call in parsed):
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{place} has a call without a name; write {{"function": {{"name": ..., "arguments": ...}}}}, or '
                "remove the call"
            )
    return {**further, "tool_calls": list(map(_as_openai, parsed))}


def _as_openai(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call as in OpenAI's API. Some records have only the function, without the object around it."""
    if "function" in call:
        return call
    around = {name: value for name, value in call.items() if name not in ("name", "arguments")}
    return {"type": "function", **around, "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def _calls(text: str, role: str, place: str) -> list[Any]:
    """The calls in a message with a role of `_CALLING`: one call or a list of calls in JSON, each with a name and
    arguments."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f'{place} has the role {role}, so its text must be a call such as {{"name": ..., "arguments": ...}}'
        )
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _parsed(function)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return {**call, "arguments": found}
    return dict(call)


def tools_of(row: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The function schemas in a record's field `tools`, as OpenAI's API has them. The field is a list, or the list as a
    text in JSON, as tables often have it. A schema may also be the function alone, as in ShareGPT's records. Raises
    DataError whose message begins with `where`."""
    given = row.get("tools")
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError):
            given = False
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise DataError(
            f"{where}: field 'tools' must be a list of function schemas, such as "
            '[{"type": "function", "function": {"name": ..., "parameters": ...}}]; rename it if it is something else'
        )
    return [{"type": "function", "function": tool} if _is_bare(tool) else tool for tool in given]


def _is_bare(tool: Mapping[str, Any]) -> bool:
    """Whether a schema is the function alone, without the type that says so. Other types of tools have a type."""
    return isinstance(tool.get("name"), str) and not {"type", "function"} & tool.keys()


def table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table without the fields that are null in its tools and calls. All tools and calls of a table have the
    same fields, so a field that one of them lacks is null there."""
    return {name: _of_table(name, value) for name, value in row.items()}


def _of_table(name: str, value: Any) -> Any:
    if name == "tools":
        return _without_nulls(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and "tool_calls" in value[0]:
        return [{**message, "tool_calls": _without_nulls(message.get("tool_calls"))} for message in value]
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _content(item: Mapping[str, Any]) -> Any:
    """The content of a message. It may be a list of parts, as in OpenAI's format. Then the parts with text are
    joined."""
    content = item.get("content", item.get("value"))
    if not isinstance(content, list) or not content:
        return content
    parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in parts if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(content) else content


def _marked(item: Mapping[str, Any], place: str) -> bool:
    """Whether the marks of a message allow it to be learnt. In a table, a record without a mark has null."""
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
    text, spans = chat.conversation(messages[: turns[-1] + 1], turns)
    return Demonstration(text, tuple(spans))


def type_name(value: Any) -> str:
    """The JSON name of the value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
