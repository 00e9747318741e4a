"""Converts rows (JSON objects) to records, in the formats of `DataSource.format`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.data.chat_template import ASSISTANT, ASSISTANTS, ChatFormat, Message
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.records import Demonstration, Kind, Preference, Prompt, Record

PROMPT_FIELDS = ("prompt", "instruction", "question", "query")
RESPONSE_FIELDS = ("response", "completion", "output", "answer")
MESSAGE_FIELDS = ("messages", "conversations")
_HEARD = ("user", "human", "system")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowFormat:
    """One shape of a row. `fits` tells whether a row has it (`format: Auto`). `read(row, kind, chat, where)` makes the
    record, or raises DataError with a sentence that `where` opens. `pairs`: rows hold a chosen and a rejected reply;
    other formats give no preferences."""

    name: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, Kind, ChatFormat, str], Record]
    pairs: bool = False


def detect(row: Row, where: str) -> str:
    """The format of a row, from its fields. Raises DataError if no format fits."""
    for each in FORMATS.values():
        if each.fits(row):
            return each.name
    raise DataError(
        f"{where}: cannot tell the format of a record with {_has(row)}; name the fields prompt and response, "
        "chosen and rejected, messages, or text, or set the source's format"
    )


def convert(row: Row, fmt: str, kind: Kind, chat: ChatFormat, where: str) -> Record:
    """The record of `kind` in the row. Every error message begins with `where`: the file and line, or the data set and
    row."""
    chosen = FORMATS[fmt]
    if kind == "preferences" and not chosen.pairs:
        raise DataError(
            f"{where}: spec.data.preferences needs records with chosen and rejected replies, "
            f"but this one has {_has(row)}"
        )
    return chosen.read(row, kind, chat, where)


def _prompt_response(row: Row, kind: Kind, chat: ChatFormat, where: str) -> Record:
    name = _need(row, PROMPT_FIELDS, where)
    prompt = _filled(_string(row, name, where), name, where)
    if kind == "prompts":
        return Prompt(prompt, {k: v for k, v in row.items() if k != name})
    response = _string(row, _need(row, RESPONSE_FIELDS, where), where)
    return Demonstration(prompt, _continued(prompt, response))


def _text(row: Row, kind: Kind, chat: ChatFormat, where: str) -> Record:
    text = _filled(_string(row, _need(row, ("text",), where), where), "text", where)
    if kind == "prompts":
        return Prompt(text, {k: v for k, v in row.items() if k != "text"})
    cut = text.rfind(ASSISTANT)
    cut = 0 if cut < 0 else cut + len(ASSISTANT)
    return Demonstration(text[:cut], text[cut:])


def _messages(row: Row, kind: Kind, chat: ChatFormat, where: str) -> Record:
    name = _need(row, MESSAGE_FIELDS, where)
    messages = _message_list(row[name], name, where)
    if kind == "prompts":
        while messages and messages[-1]["role"] in ASSISTANTS:
            messages = messages[:-1]
        if not messages:
            raise DataError(f"{where}: field {name!r} holds no user message to answer")
        return Prompt(chat.prompt(messages), {k: v for k, v in row.items() if k != name})
    if not messages or messages[-1]["role"] not in ASSISTANTS:
        raise DataError(f"{where}: the last of field {name!r} must be an assistant message, for it is what SFT learns")
    return Demonstration(chat.prompt(messages[:-1]), chat.reply(messages[:-1], messages[-1]["content"]))


def _chosen_rejected(row: Row, kind: Kind, chat: ChatFormat, where: str) -> Record:
    for name in ("chosen", "rejected"):
        if name not in row:
            raise DataError(f"{where}: field {name!r} is missing; the record has {_has(row)}")
    fields = {k: v for k, v in row.items() if k not in ("prompt", "chosen", "rejected")}
    if isinstance(row["chosen"], list):
        return _from_pair(kind, *_message_pair(row, chat, where), fields)
    chosen, rejected = _string(row, "chosen", where), _string(row, "rejected", where)
    if row.get("prompt") is not None:
        prompt = _filled(_string(row, "prompt", where), "prompt", where)
        # Some sets repeat the prompt at the start of both.
        if chosen.startswith(prompt) and rejected.startswith(prompt):
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        return _from_pair(kind, prompt, _continued(prompt, chosen), _continued(prompt, rejected), fields)
    common = _common(chosen, rejected)
    cut = max(common.rfind(" "), common.rfind("\n"))
    cut = 0 if cut < 0 else cut
    if kind == "prompts" and not common[:cut].strip():
        raise DataError(f"{where}: chosen and rejected have no common beginning to use as prompt; add a field 'prompt'")
    return _from_pair(kind, chosen[:cut], chosen[cut:], rejected[cut:], fields)


def _message_pair(row: Row, chat: ChatFormat, where: str) -> tuple[str, str, str]:
    """Conversational preferences: lists of messages that share all but the last, with or without a prompt list."""
    chosen = _message_list(row["chosen"], "chosen", where)
    rejected = _message_list(row["rejected"], "rejected", where)
    given = row.get("prompt")
    before: list[Message] = []
    if isinstance(given, list):
        before = _message_list(given, "prompt", where)
    elif isinstance(given, str) and len(chosen) == 1:
        before = [{"role": "user", "content": given}]
    if not isinstance(given, list) and chosen[:-1] == rejected[:-1]:
        before = before + chosen[:-1]
    if not before or not chosen or not rejected:
        raise DataError(f"{where}: chosen and rejected must be one assistant message each after a common dialogue")
    return chat.prompt(before), chat.reply(before, chosen[-1]["content"]), chat.reply(before, rejected[-1]["content"])


def _is_hh(row: Row) -> bool:
    texts = (row.get("chosen"), row.get("rejected"))
    return "prompt" not in row and all(isinstance(text, str) and ASSISTANT in text for text in texts)


def _read_hh(row: Row, kind: Kind, chat: ChatFormat, where: str) -> Record:
    return _from_pair(kind, *_hh(row, where))


def _hh(row: Row, where: str) -> tuple[str, str, str]:
    """The prompt is the common dialogue up to its last "\\n\\nAssistant:"."""
    chosen = _string(row, _need(row, ("chosen",), where), where)
    rejected = _string(row, _need(row, ("rejected",), where), where)
    cut = _common(chosen, rejected).rfind(ASSISTANT)
    if cut < 0:
        raise DataError(
            f"{where}: chosen and rejected have no common dialogue up to an 'Assistant:' turn, as format HH needs"
        )
    cut += len(ASSISTANT)
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _common(a: str, b: str) -> str:
    """The longest text with which both begin."""
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:end]


def _from_pair(kind: Kind, prompt: str, chosen: str, rejected: str, fields: dict[str, Any] | None = None) -> Record:
    if kind == "preferences":
        return Preference(prompt, chosen, rejected)
    return Demonstration(prompt, chosen) if kind == "demonstrations" else Prompt(prompt, fields or {})


def _continued(prompt: str, response: str) -> str:
    """The response, with a space before it if nothing else separates it from the prompt."""
    joined = not response or response[0].isspace() or prompt[-1].isspace()
    return response if joined else " " + response


def _message_list(value: Any, name: str, where: str) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: field {name!r} must be a list of messages, not {_type(value)}")
    messages = []
    for i, item in enumerate(value):
        role = item.get("role", item.get("from")) if isinstance(item, Mapping) else None
        content = item.get("content", item.get("value")) if isinstance(item, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: message {i} of field {name!r} needs 'role' and 'content', both strings")
        if role not in _HEARD and role not in ASSISTANTS:
            raise DataError(f"{where}: message {i} of field {name!r} has role {role!r}; use system, user or assistant")
        messages.append({"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content})
    return messages


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((n for n in names if row.get(n) is not None), None)


def _need(row: Row, names: Sequence[str], where: str) -> str:
    name = _first(row, names)
    if name is None:
        wanted = f"field {names[0]!r}" + (f" (or {', '.join(names[1:])})" if len(names) > 1 else "")
        raise DataError(f"{where}: {wanted} is missing; the record has {_has(row)}")
    return name


def _string(row: Row, name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {name!r} must be a string, not {_type(value)}")
    return value


def _filled(text: str, name: str, where: str) -> str:
    if not text:
        raise DataError(f"{where}: field {name!r} is an empty string")
    return text


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _has(row: Row) -> str:
    names = [repr(n) for n in row]
    return ("fields " if len(names) > 1 else "only ") + ", ".join(names[:12]) if names else "no fields"


# By the names of `DataSource.format`, in the order in which `detect` asks them.
FORMATS: dict[str, RowFormat] = {
    each.name: each
    for each in (
        RowFormat("Messages", lambda row: _first(row, MESSAGE_FIELDS) is not None, _messages),
        RowFormat("HH", _is_hh, _read_hh, pairs=True),
        RowFormat("ChosenRejected", lambda row: "chosen" in row and "rejected" in row, _chosen_rejected, pairs=True),
        RowFormat("PromptResponse", lambda row: _first(row, PROMPT_FIELDS) is not None, _prompt_response),
        RowFormat("Text", lambda row: "text" in row, _text),
    )
}
