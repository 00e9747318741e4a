"""Reads what the model wrote as a message: its thought, its words and its calls of tools.

Transformers reads a text by a description of its format (`response_template`), which a tokenizer may have. Most have
none yet. For these the description is derived from the chat template: it writes a call that is known, and what is
around the known parts is the format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from dovetail.coordinator.data.text.chat_template import ChatFormat, Message, NotWritten, TemplateRefused
from dovetail.coordinator.sessions.bridge import Tools, before_any

_NAME, _KEYS, _VALUES = "probed_tool", ("first_key", "second_key"), ("first value", "second value")
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_SAID = "probed words"
# How a call is made of what was found: the name before the arguments, and these.
_NAMED = {"name": "{name}", "arguments": "{content}"}
# A thought begins the turn, or the prompt for it. Elsewhere the tag is a word.
_THOUGHT = r"\A\s*<think>"
# How deep the objects and lists of a call may be in each other.
DEPTH = 64
_TOO_DEEP = f"the call has more than {DEPTH} objects and lists in each other"
# No pattern below reads a text twice: a model that repeats itself writes thousands of openings.
_NAME_OF_TOOL = r"(?P<name>[^\s<>\[\]{}|\"]+)"


class Unreadable(ValueError):
    """The calls of this chat template cannot be read. The message is one sentence."""


class WrongCall(ValueError):
    """The model wrote a call that is none. The message is for the model."""


@dataclass(frozen=True)
class AnswerReader:
    """Reads answers of one model. `template` is a `response_template` of Transformers."""

    tokenizer: Any
    template: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Any, chat: ChatFormat) -> AnswerReader:
        """The reader for a tokenizer and its chat format. Raises Unreadable."""
        own = getattr(tokenizer, "response_template", None)
        return cls(tokenizer, own or _derived(tokenizer, chat))

    def read(self, prompt: Sequence[int], tokens: Sequence[int], tools: Tools, stops: Sequence[str] = ()) -> Message:
        """The message in the sampled `tokens`, the answer to `prompt`, before any of `stops`. The calls have no ids
        yet. Raises WrongCall."""
        before, text = (self.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in (prompt, tokens))
        return self.read_text(before, before_any(text, stops), tools)

    def read_text(self, before: str, text: str, tools: Tools) -> Message:
        """The message in `text`, the answer to the prompt `before`. Raises WrongCall."""
        try:
            found = self.tokenizer.parse_response(text, self.template, prefix=before, tools=list(tools))
        except RecursionError as error:
            raise WrongCall(_TOO_DEEP) from error
        except (ValueError, KeyError) as error:
            raise WrongCall(f"the call cannot be read: {str(error).splitlines()[0]}") from error
        for call in found.get("tool_calls", []):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                _check_storable(function)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise WrongCall("a call has no name")
            if not isinstance(function.get("arguments"), dict):
                raise WrongCall(f"the arguments of {function['name']} are no object")
            if "" in function["arguments"]:
                raise WrongCall(f"an argument of {function['name']} has no name or no end")
        return {**found, "content": found.get("content", "").strip()}


def _check_storable(function: Mapping[str, Any]) -> None:
    """Raises WrongCall for what others cannot write again: the store, the chat template, and the environment."""
    if deeper(function, DEPTH):
        raise WrongCall(_TOO_DEEP)
    try:
        json.dumps(function, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise WrongCall("the call has half of a character (a lone surrogate)") from error


def deeper(value: Any, depth: int) -> bool:
    """Whether so many objects and lists in each other have yet others in them."""
    level = [value]
    for _ in range(depth):
        level = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def _derived(tokenizer: Any, chat: ChatFormat) -> dict[str, Any]:
    try:
        said = written_turn(chat, {"role": "assistant", "content": _SAID})
        called = written_turn(chat, {"role": "assistant", "content": "", "tool_calls": [_probe(_ARGUMENTS)]})
        opening = chat.prompt([{"role": "user", "content": _SAID}]).rpartition(_SAID)[2]
    except (NotWritten, TemplateRefused) as error:
        raise Unreadable(f"the tokenizer's chat template writes no call of a tool: {error}") from error
    before, _, end = said.partition(_SAID)
    ends = [each for each in (end.strip(), *getattr(tokenizer, "reply_ends", ())) if each]
    over = "|".join([*map(re.escape, ends), "$"])
    closed = "|".join([r"</think>\s*", *(f"(?={re.escape(each)})" for each in ends)])
    text = _without_end(called.removeprefix(before), ends)
    anchor = opening.partition("<think>")[0].strip().rpartition("\n")[2]
    for field in filter(None, (_json_call(text, over), _named_call(text, over), _tagged_call(text, over))):
        template = {
            "defaults": {"role": "assistant"},
            **({"start_anchor": anchor} if anchor else {"start_anchor_pattern": r"\Z"}),
            "fields": {
                "reasoning_content": {"open_pattern": _THOUGHT, "close_pattern": closed, "content": "text"},
                "tool_calls": {
                    "repeats": True,
                    "transform": {"type": "function", "function": field.pop("is")},
                    **field,
                },
                # There may be words before, between and after calls.
                "content": {"close_pattern": rf"(?:{over})\s*", "content": "text", "repeats": True, "join": "\n"},
            },
        }
        if _reads(AnswerReader(tokenizer, template), chat):
            return template
    raise Unreadable(
        f"calls as the tokenizer's chat template writes them ({text!r}) cannot be read; give the tokenizer a "
        "response_template, as Transformers documents it"
    )


def _probe(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": "probe0000", "function": {"name": _NAME, "arguments": arguments}}


def _reads(reader: AnswerReader, chat: ChatFormat) -> bool:
    """Whether words and calls are read as they were written."""
    arguments = {"text": 'a "word", <b>', "count": 3, "exact": True}
    kinds = {"text": "string", "count": "integer", "exact": "boolean"}
    parameters = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    tools = [{"type": "function", "function": {"name": _NAME, "parameters": parameters}}]
    asked = [{"role": "user", "content": "?"}]
    answers: list[Message] = [{"content": _SAID}, {"content": "", "tool_calls": [_probe(arguments)]}]
    for answer in answers:
        text, spans = chat.conversation([*asked, {"role": "assistant", **answer}], [1])
        try:
            found = reader.read_text(text[: spans[0][0]], text[spans[0][0] :], tools)
        except WrongCall:
            return False
        calls = [call["function"] for call in found.get("tool_calls", [])]
        expected = [call["function"] for call in answer.get("tool_calls", [])]
        if (found["content"], calls) != (answer["content"], expected) or found.get("reasoning_content"):
            return False
    return True


def written_turn(chat: ChatFormat, answer: Message) -> str:
    """What the model writes where it gives this answer."""
    text, spans = chat.conversation([{"role": "user", "content": "?"}, answer], [1])
    return text[spans[0][0] : spans[-1][1]]


def _without_end(text: str, ends: Sequence[str]) -> str:
    for end in ends:
        text = text.rstrip().removesuffix(end)
    return text


def _closed(text: str, over: str) -> str:
    """The pattern that ends a call, after which the template writes `text`. `over` ends the turn."""
    return (re.escape(text.strip()) if text.strip() else f"(?:{over})") + r"\s*"


def _json_call(text: str, over: str) -> dict[str, Any] | None:
    """A call that is one object with the name and the arguments."""
    for at in (match.start() for match in re.finditer(r"\{", text)):
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            continue
        names = [key for key, value in found.items() if value == _NAME]
        arguments = [key for key, value in found.items() if value == _ARGUMENTS]
        if len(names) == len(arguments) == 1:
            # A call without a mark before it begins with its name.
            opened = re.escape(text[:at].strip()) or rf'(?=\{{\s*"{re.escape(names[0])}"\s*:)'
            function = {"name": f"{{content.{names[0]}}}", "arguments": f"{{content.{arguments[0]}}}"}
            return {
                "open_pattern": opened,
                "close_pattern": _closed(text[end:], over),
                "content": "json",
                "is": function,
            }
    return None


def _named_call(text: str, over: str) -> dict[str, Any] | None:
    """A call that is a name, and then an object with the arguments."""
    opened, found, rest = text.partition(_NAME)
    if not found:
        return None
    between, _, _ = rest.partition("{")
    try:
        arguments, end = json.JSONDecoder().raw_decode(rest, len(between))
    except ValueError:
        return None
    if arguments != _ARGUMENTS or not opened.strip() or not between.strip():
        return None
    pattern = rf"{re.escape(opened.strip())}\s*{_NAME_OF_TOOL}{_spaced(between)}"
    return {"open_pattern": pattern, "close_pattern": _closed(rest[end:], over), "content": "json", "is": _NAMED}


def _tagged_call(text: str, over: str) -> dict[str, Any] | None:
    """A call that is a name, and then each argument's key and value between tags."""
    words = [_NAME, _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1]]
    if re.findall("|".join(words), text) != words:
        return None
    opened, before, middle, after, again, closed = re.split("|".join(words), text)
    if middle != again or not opened.strip() or not middle.strip():
        return None
    # After the first value comes its end and the second key's beginning; after the second its end and that of the call.
    ends = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(after, closed, strict=False)))
    ends = ends[: ends.rfind(">") + 1].strip()
    starts = after.strip().removeprefix(ends).strip()
    if not ends or not starts:
        return None
    rest = closed.strip().removeprefix(ends)
    opening, end = re.escape(starts), re.escape(ends)
    # What has no name or no end is an argument without a name, which reaches to the end.
    tag = rf"{opening}(?:(?P<key>[^\s<>]+){_spaced(middle)}(?P<value>.*?){end}|(?P<key>)(?P<value>.*))"
    head = before.strip().removesuffix(starts).strip()
    return {
        "open_pattern": rf"{re.escape(opened.strip())}\s*{_NAME_OF_TOOL}{_spaced(head)}",
        "close_pattern": _closed(rest, over),
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag, "value_parser": {"name": "text"}},
        "is": _NAMED,
    }


def _spaced(text: str) -> str:
    """A pattern for a text around which white space may differ."""
    return rf"\s*{re.escape(text.strip())}\s*" if text.strip() else r"\s*"
