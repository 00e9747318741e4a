"""Turns dialogues into text, in the Human/Assistant format or with the tokenizer's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from itertools import islice, pairwise, product
from typing import Any, Protocol

from dovetail.coordinator.data.records import Rendered

HUMAN = "\n\nHuman: "
ASSISTANT = "\n\nAssistant:"
_HEADS = {"user": HUMAN, "human": HUMAN, "assistant": ASSISTANT + " ", "gpt": ASSISTANT + " ", "system": "\n\nSystem: "}
_HEADS["developer"] = _HEADS["system"]
ASSISTANTS = ("assistant", "gpt")
# The fields in which an assistant's message has its thought, apart from the content.
REASONING = ("reasoning_content", "reasoning", "thinking")

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

# role and content are texts. An assistant's message may have tool_calls and its reasoning. A tool's message names the
# call that it answers.
Message = dict[str, Any]

# The Human/Assistant format as a chat template. Before it comes what the tokenizer writes before every text.
HUMAN_ASSISTANT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- '\\n\\nHuman: ' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{- '\\n\\nAssistant: ' + message['content'] }}"
    "{%- elif message['role'] in ['system', 'developer'] %}{{- '\\n\\nSystem: ' + message['content'] }}"
    "{%- else %}{{- raise_exception('the role ' + message['role'] + ' is not system, user or assistant') }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\n\\nAssistant:' }}{%- endif %}"
)


def human_assistant_template(tokenizer: Any) -> str:
    """The Human/Assistant format as a chat template for this tokenizer. It is for models whose tokenizer has no
    template."""
    opening = _opening(tokenizer)
    return (f"{{{{- {_literal(opening)} }}}}" if opening else "") + HUMAN_ASSISTANT_TEMPLATE


def with_options(template: str, options: Mapping[str, Any]) -> str:
    """A chat template with these options as its defaults. A caller that renders it may still give others.

    The values are JSON. The first text of the template keeps its white space: transformers removes the line break after
    a block (trim_blocks)."""
    blocks = (
        f"{{%- if {n} is not defined %}}{{%- set {n} = {_literal(v)} %}}{{%- endif %}}" for n, v in options.items()
    )
    return "".join(f"{block}\n" for block in blocks) + template


def _literal(value: Any) -> str:
    """A JSON value in Jinja."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    # Jinja reads the escapes of JSON, but it does not join the two halves of a character beyond 16 bits.
    return json.dumps(value, ensure_ascii=False)


def options_of(template: str) -> tuple[set[str], set[str]]:
    """Two sets of names. The first has the names that a chat template may take from outside. The second has those of
    them that it sets never, or only if they are missing. Raises ValueError if it cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes
    from jinja2.ext import loopcontrols

    try:
        # Jinja alone does not know the block that marks what an assistant says. transformers adds it.
        parsed = Environment(extensions=[loopcontrols]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ValueError(str(error)) from error
    names: set[str] = meta.find_undeclared_variables(parsed)
    set_here = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    tests = (test for test in parsed.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    optional = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}
    return names, names - (set_here - optional)


class TemplateRefused(ValueError):
    """A tokenizer's chat template refuses the messages. The message is the template's own."""


class NotWritten(ValueError):
    """The text cannot say what message `index` says. `reason` goes on after "message 3 "."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"message {index} {reason}")
        self.index, self.reason = index, reason


Spans = list[tuple[int, int]]


class ChatFormat(Protocol):
    """Turns messages (role, content) into text. Methods raise TemplateRefused and NotWritten."""

    @property
    def shows_tools(self) -> bool:
        """Whether the text says which tools there are."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        """The same format for a conversation in which the assistant has these tools: function schemas, as in OpenAI's
        API."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text up to the point where the assistant's next turn begins."""

    def conversation(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, Spans]:
        """The text of a conversation, and for each of the assistant's `turns` the (start, end) of what the model must
        produce there, in characters. The last message is the last of `turns`. The text ends with that turn, and with an
        end token if the format has one."""

    def following(self, messages: Sequence[Message], turn: int, end: str) -> tuple[str, str] | None:
        """The text of the assistant's `turn` up to the token `end`, with which the model ended it, and what follows it
        up to the point where the assistant's next turn begins. None unless the text before is the prompt for `turn`,
        and the turn is whole."""


class HumanAssistant:
    """Anthropic's format of the hh-rlhf data set, for models without a template. `opening` is what the tokenizer writes
    before every text, and `end` is its end token. Both are None where no tokenizer is known."""

    shows_tools = False

    def __init__(self, opening: str | None = None, end: str | None = None) -> None:
        self._opening, self._end = opening, end

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        return self

    def prompt(self, messages: Sequence[Message]) -> str:
        return self._text(self._written(messages) + ASSISTANT)

    def conversation(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, Spans]:
        for i in turns:
            if any(messages[i].get(name) for name in REASONING):
                raise NotWritten(i, "has a thought, but the tokenizer has no chat template to write it; remove it")
        text = self._text(self._written(messages) + (self._end or ""))
        ends = [len(self._text(self._written(messages[: i + 1]))) for i in turns]
        starts = [len(self.prompt(messages[:i])) for i in turns]
        return text, list(zip(starts, [*ends[:-1], len(text)], strict=True))

    def following(self, messages: Sequence[Message], turn: int, end: str) -> tuple[str, str] | None:
        return None  # earlier turns have no end token in this format

    def _written(self, messages: Sequence[Message]) -> str:
        for i, message in enumerate(messages):
            if message["role"] == "tool" or "tool_calls" in message:
                raise NotWritten(
                    i,
                    "belongs to a call of a tool, but the tokenizer has no chat template that could write it; take a "
                    "tokenizer with one, or remove the record",
                )
        return "".join(_HEADS[m["role"]] + m["content"] for m in messages)

    def _text(self, text: str) -> str:
        return text if self._opening is None else Rendered(self._opening + text)


class WithSystem:
    """A format that adds a system message to each conversation without one."""

    def __init__(self, chat: ChatFormat, system: str) -> None:
        self.chat, self._system = chat, system

    @property
    def shows_tools(self) -> bool:
        return self.chat.shows_tools

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        return WithSystem(self.chat.with_tools(tools), self._system)

    def _opened(self, messages: Sequence[Message]) -> list[Message]:
        if any(message["role"] in ("system", "developer") for message in messages):
            return list(messages)
        return [{"role": "system", "content": self._system}, *messages]

    def prompt(self, messages: Sequence[Message]) -> str:
        opened = self._opened(messages)
        with _counted_from(len(opened) - len(messages)):
            return self.chat.prompt(opened)

    def conversation(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, Spans]:
        opened = self._opened(messages)
        added = len(opened) - len(messages)
        with _counted_from(added):
            return self.chat.conversation(opened, [i + added for i in turns])

    def following(self, messages: Sequence[Message], turn: int, end: str) -> tuple[str, str] | None:
        opened = self._opened(messages)
        added = len(opened) - len(messages)
        with _counted_from(added):
            return self.chat.following(opened, turn + added, end)


@contextmanager
def _counted_from(first: int) -> Iterator[None]:
    """Number the messages in errors as the record does, which lacks the first ones."""
    try:
        yield
    except NotWritten as error:
        if error.index < first:
            raise TemplateRefused("it leaves the system prompt out") from None
        raise NotWritten(error.index - first, error.reason) from None


# No record has this character, which Unicode leaves to private agreements. It stands for a message in a text.
_MARK = "\U0010fff0"


# What a tool's message says of the call that it answers. Some templates refuse a message without it.
_ANSWERED = ("name", "tool_call_id")
_UNWRITTEN_CALL = (
    "calls a tool, but the tokenizer's chat template does not write tool_calls; take a tokenizer whose template does, "
    "or remove the record"
)
_UNWRITTEN_CALLS = (
    "calls several tools, but the tokenizer's chat template does not write all of these calls; give each call a "
    "message of its own, or remove the record"
)
_MIXED = (
    "is in the text of the conversation among what the assistant says, because the tokenizer's chat template writes "
    'earlier turns otherwise; mark all turns but the last with "train": false, or remove the record'
)


class Template:
    """The chat template of a Hugging Face tokenizer. It gets the function schemas in `tools`. A template that writes
    the date always writes `today`."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), today: datetime | None = None) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._today = today or datetime.now()

    @cached_property
    def shows_tools(self) -> bool:
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, Mapping):
            return "tool_use" in template or "tools" in str(template.get("default"))
        try:
            return "tools" in options_of(str(template))[0]
        except ValueError:
            return "tools" in str(template)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        return Template(self._tokenizer, tools, self._today)

    @cached_property
    def _source(self) -> str:
        """The template that these conversations are written with."""
        template = getattr(self._tokenizer, "chat_template", "")
        if isinstance(template, Mapping):
            template = template.get("tool_use" if self._tools and "tool_use" in template else "default", "")
        return str(template)

    @cached_property
    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"tools": self._tools} if self._tools else {}
        if "strftime_now" in self._source:
            options["strftime_now"] = self._today.strftime
        return options

    @cached_property
    def _ends(self) -> list[str]:
        """The tokens that end a reply: the tokenizer's end token, and those of the model's generation_config.json."""
        ends = {self._tokenizer.eos_token, *getattr(self._tokenizer, "reply_ends", ())}
        return sorted(filter(None, ends))

    @cached_property
    def _thoughts(self) -> list[str]:
        """The fields in which the template looks for a thought."""
        return [name for name in REASONING if re.search(rf"[.'\"]{name}\b", self._source)]

    @cached_property
    def _opens_twice(self) -> bool:
        """Whether the template writes an empty thought before a content that begins with one in tags."""
        tagged = {"role": "assistant", "content": f"<think>\n{_MARK}\n</think>\n\n?"}
        try:
            text = self._tokenizer.apply_chat_template(
                [self._named({"role": "user", "content": "?"}), tagged], tokenize=False, **self._options
            )
        except Exception:
            return False
        return re.search(rf"</think>\s*<think>\s*{_MARK}", text) is not None

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        try:
            given = [self._named(message) for message in messages]
            return str(self._tokenizer.apply_chat_template(given, tokenize=False, **self._options, **options))
        except Exception as error:  # a template may raise any error, such as for a system message
            raise TemplateRefused(" ".join(str(error).split()) or type(error).__name__) from error

    def _writes(self, *messages: Message) -> bool:
        """Whether the template writes the mark in the messages."""
        try:
            return _MARK in self._tokenizer.apply_chat_template(list(messages), tokenize=False, **self._options)
        except Exception:
            return False

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template takes contents only as lists of parts."""
        text, parts = ({"role": "user", "content": content} for content in (_MARK, _parts(_MARK)))
        return not self._writes(text) and self._writes(parts)

    @cached_property
    def _calls_as(self) -> tuple[bool, bool]:
        """How the template wants a message that only calls tools: whether its content must be null, and the arguments a
        text, as in OpenAI's API."""
        asked = self._named({"role": "user", "content": "?"})
        call = {"id": "call00000", "function": {"name": "f", "arguments": {"a": _MARK}}}
        for null, text in product((False, True), repeat=2):
            calls = [_with_text(call) if text else {"type": "function", **call}]
            if self._writes(asked, {"role": "assistant", "content": None if null else "", "tool_calls": calls}):
                return null, text
        return False, False

    def _named(self, message: Message) -> Message:
        """The message in the form that the template reads: its content, its thought and its calls. A developer is the
        system where the template knows none."""
        if message["role"] == "developer" and "developer" not in self._source:
            message = {**message, "role": "system"}
        if message["role"] in ASSISTANTS and not any(message.get(name) for name in REASONING) and self._thoughts:
            thought, tagged = _thought(message)
            if tagged and self._opens_twice:
                message = {**message, "content": message["content"][len(tagged) :], self._thoughts[0]: thought}
        if calls := message.get("tool_calls"):
            null, text = self._calls_as
            content = None if null and not message["content"] else message["content"]
            message = {**message, "content": content, "tool_calls": list(map(_with_text, calls)) if text else calls}
        if self._in_parts and isinstance(message["content"], str):
            message = {**message, "content": _parts(message["content"])}
        own = next((name for name in REASONING if name in message), None)
        if own is None or own in self._thoughts or not self._thoughts:
            return message
        return {(self._thoughts[0] if name == own else name): value for name, value in message.items()}

    def prompt(self, messages: Sequence[Message]) -> str:
        text = self._render(messages, add_generation_prompt=True)
        self._check_written(messages, text, add_generation_prompt=True)
        return Rendered(text, messages)

    def conversation(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, Spans]:
        whole = self._render(messages)
        self._check_written(messages, whole)
        text, start = self._last(messages, whole)
        spans: Spans = []
        for i in turns[:-1]:
            spans.append(self._earlier(messages, i, whole, spans[-1][1] if spans else 0))
        spans = self._narrowed(messages, text, [*spans, (start, len(text))])
        self._check_learnt(messages, text, spans, turns[0])
        return Rendered(text), spans

    def following(self, messages: Sequence[Message], turn: int, end: str) -> tuple[str, str] | None:
        whole = self._render(messages, add_generation_prompt=True)
        self._check_written(messages, whole, turn, add_generation_prompt=True)
        prompt = self._render(messages[:turn], add_generation_prompt=True)
        closed = whole.find(end, len(prompt)) + len(end)
        written = whole[len(prompt) : closed]
        if not whole.startswith(prompt) or not written.endswith(end) or not self._says(messages[turn], written):
            return None
        return written, whole[closed:]

    def _says(self, answer: Message, written: str) -> bool:
        """Whether the text of a turn has its thought and its answer."""
        said = str(answer["content"] or "").rpartition("</think>")[2].strip()
        return said in written and _thought(answer)[0] in written

    def _check_written(self, messages: Sequence[Message], text: str, first: int = 0, **options: Any) -> None:
        """Raises NotWritten for a call of a tool, or for a message, that the text lacks. Messages before `first` are
        not looked at."""

        def same(i: int, *other: Message) -> bool:
            try:
                return self._render([*messages[:i], *other, *messages[i + 1 :]], **options) == text
            except TemplateRefused:
                return False

        for i, message in islice(enumerate(messages), first, None):
            calls = message.get("tool_calls") or []
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            for n in range(len(calls)):
                fewer = [*calls[:n], *calls[n + 1 :]]
                if same(i, {**rest, "tool_calls": fewer} if fewer else rest):
                    raise NotWritten(i, _UNWRITTEN_CALLS if fewer else _UNWRITTEN_CALL)
            said = message["content"]
            content = said.rpartition("</think>")[2].strip() if isinstance(said, str) else ""
            if content not in text and self._lacks(messages, i, **options):
                raise NotWritten(
                    i,
                    f"has the role {message['role']}, and the tokenizer's chat template leaves its content out; take a "
                    "tokenizer whose template writes it, or remove the message",
                )

    def _check_learnt(self, messages: Sequence[Message], text: str, spans: Spans, first: int) -> None:
        """Raises NotWritten if a part that is learnt has what a message says that is not the assistant's, or if two
        parts overlap. Some templates write a tool's answer into the turn that called it, or write an earlier turn
        otherwise once another one follows."""
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise NotWritten(first, _MIXED)
        for i, message in enumerate(messages):
            said = message["content"] if message["role"] not in ASSISTANTS else ""
            if not said.strip() or not any(said.strip() in text[start:end] for start, end in spans):
                continue
            try:
                at = _common(text, self._marked(messages, i))
            except TemplateRefused:
                continue
            if any(start <= at < end for start, end in spans):
                raise NotWritten(i, _MIXED)

    def _lacks(self, messages: Sequence[Message], at: int, **options: Any) -> bool:
        """Whether the text does not say the content of a message."""
        try:
            return _MARK not in self._render(
                [*messages[:at], {**messages[at], "content": _MARK}, *messages[at + 1 :]], **options
            )
        except TemplateRefused:
            return False

    def _marked(self, messages: Sequence[Message], at: int) -> str:
        """The text with the mark as the content of message `at`."""
        other = {name: messages[at][name] for name in ("role", *_ANSWERED) if name in messages[at]} | {"content": _MARK}
        return self._render([*messages[:at], other, *messages[at + 1 :]])

    def _content(self, messages: Sequence[Message], text: str, at: int) -> tuple[int, int]:
        """The (start, end) of what message `at` adds to the text of `messages`."""
        marked = self._marked(messages, at)
        start = _common(text, marked)
        return start, len(text) - _common(text[start:][::-1], marked[::-1])

    def _closed(self, text: str, said: int) -> int:
        """The end of a turn whose content ends at `said`. What a template writes after the end token, such as a line
        break, is not the model's to write."""
        ends = [at + len(end) for end in self._ends if (at := text.find(end, said)) >= 0]
        return min(ends, default=len(text))

    def _last(self, messages: Sequence[Message], text: str) -> tuple[str, int]:
        """The text of a conversation up to the end of its last turn, and the start of what the model must produce
        there. The prompt for that turn begins the text."""
        *before, answer = messages
        prompt = self._render(before, add_generation_prompt=True)
        first, said = self._content(messages, text, len(before))
        thought = self._left_out(answer, len(before), prompt, text[min(first, len(prompt)) : said])
        if thought or not text.startswith(prompt):
            # The prompt may open a thought. Many templates leave out thoughts, or write the record's own tag.
            shared = min(_common(text, prompt), first)
            opened, written = prompt[shared:], text[first:said]
            given = (thought.rstrip() if written[:1].isspace() else thought) + written
            tag = opened.strip()
            if opened and not tag and not thought:  # the prompt has a line break that the turn lacks
                given = text[shared:said]
            elif text[shared:first].strip() or not given.lstrip().startswith(tag):
                raise NotWritten(len(before), _unlike(tag))
            elif tag:
                given = given.lstrip().removeprefix(tag).removeprefix(opened[opened.index(tag) + len(tag) :])
            text, said = prompt + given + text[said:], len(prompt) + len(given)
        end = self._closed(text, said)
        closed = any(text.endswith(token, said, end) for token in self._ends)
        return text[:end] if closed else text + self._tokenizer.eos_token, len(prompt)

    def _left_out(self, answer: Message, at: int, prompt: str, written: str) -> str:
        """The thought of the last message, with its tags, if `written` lacks it."""
        thought, tagged = _thought(answer)
        if not tagged or (thought in written if thought else "</think>" in prompt[-24:] + written):
            return ""
        if prompt.rstrip().endswith("</think>"):
            raise NotWritten(at, _unlike("</think>"))
        if "</think>" not in self._source:
            raise NotWritten(
                at,
                "has a thought, but the tokenizer's chat template does not write it; put it into the content, or "
                "remove it",
            )
        return tagged

    def _earlier(self, messages: Sequence[Message], at: int, text: str, after: int) -> tuple[int, int]:
        """Where a learnt turn is in the text of a longer conversation. It may be closed otherwise there than at the end
        of a text. `after` is the end of the learnt turn before it."""
        before, alone = self._render(messages[:at], add_generation_prompt=True), self._render(messages[: at + 1])
        _, said = self._content(messages[: at + 1], alone, at)
        close = alone[said : self._closed(alone, said)]
        closes = [close, *(close.removesuffix(end) for end in self._ends if close.endswith(end)), ""]
        if alone.startswith(before):
            for each in closes:
                if text.startswith(alone[:said] + each):
                    return self._complete(messages, at, text, len(before), said + len(each))
        first, said = self._content(messages, text, at)
        # What the template writes where an answer begins.
        opening = before[_common(before, self._render(messages[:at])) :]
        start = min(_common(text, before), first)
        if start < len(before) - len(opening):  # the turns before it are other ones, too
            found = text.rfind(opening, after, first) if opening else -1
            start = found + len(opening) if found >= 0 else first
        end = next(said + len(each) for each in closes if text.startswith(each, said))
        return self._complete(messages, at, text, start, end)

    def _complete(self, messages: Sequence[Message], at: int, text: str, start: int, end: int) -> tuple[int, int]:
        """The (start, end) of an earlier turn with its end token. Raises NotWritten if the text lacks its thought or
        its answer."""
        if not self._says(messages[at], text[start:end]):
            raise NotWritten(
                at,
                "is not in the text of the whole conversation, because the tokenizer's chat template rewrites earlier "
                'turns; mark it with "train": false',
            )
        if not any(text.endswith(token, start, end) for token in self._ends):
            end += max(len(token) for token in (*self._ends, "") if text.startswith(token, end))
        return start, end

    def _narrowed(self, messages: Sequence[Message], text: str, spans: Spans) -> Spans:
        """The parts of the spans that the template itself marks as the assistant's, if it marks any. The end token that
        follows them is learnt, too."""
        if not _GENERATION.search(self._source):
            return spans
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self._tokenizer.special_tokens_map, **self._options}
        given = [self._named(message) for message in messages]
        (whole,), (marks,) = render_jinja_template(
            [given], chat_template=self._source, return_assistant_tokens_mask=True, **options
        )
        found: Spans = []
        for start, end in spans:
            own = [(max(a, start), min(b, end)) for a, b in marks if a < end and b > start]
            if not own or not whole.startswith(text[: own[-1][1]]):
                own = [(start, end)]
            if text[own[-1][1] : end].strip() in self._ends:
                own[-1] = (own[-1][0], end)
            for each in own:
                if found and found[-1][1] == each[0]:
                    each = (found.pop()[0], each[1])
                found.append(each)
        return found


def _parts(text: str) -> list[dict[str, str]]:
    """A content in the parts of OpenAI's API."""
    return [{"type": "text", "text": text}]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are a text in JSON."""
    function = call["function"]
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": text}}


def _thought(answer: Message) -> tuple[str, str]:
    """The thought of an assistant's message, and the text with its tags that opens the content. Both are "" if there is
    none."""
    own = next((str(answer[name]).strip() for name in REASONING if answer.get(name)), "")
    if own:
        return own, f"<think>\n{own}\n</think>\n\n"
    thought, tag, said = str(answer["content"]).rpartition("</think>")
    inner = thought.strip().removeprefix("<think>").strip()
    return inner, thought + tag + said[: len(said) - len(said.lstrip())] if tag else ""


def _unlike(opened: str) -> str:
    """Why an answer cannot follow the prompt for it, which begins it with `opened`."""
    if not opened:
        return "is written otherwise by the tokenizer's chat template than its prompt for an answer begins it"
    if opened.startswith("</"):
        return f"has a thought, but the prompt for it closes thoughts ({opened}); remove it, or set chatTemplateKwargs"
    return (
        f"does not begin with {opened!r}, as the tokenizer's chat template begins each answer; begin the content with "
        "it, or set chatTemplateKwargs if the template can leave it out"
    )


def _common(a: str, b: str) -> int:
    """The length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.startswith(b[:middle]) else (low, middle - 1)
    return low


def chat_format(tokenizer: Any | None, today: datetime | None = None) -> ChatFormat:
    """The format for a tokenizer. It is the chat template if the tokenizer has one, otherwise Human/Assistant."""
    if getattr(tokenizer, "chat_template", None):
        return Template(tokenizer, today=today)
    return HumanAssistant() if tokenizer is None else HumanAssistant(_opening(tokenizer), tokenizer.eos_token)


def _opening(tokenizer: Any) -> str:
    """What the tokenizer writes before every text, such as a beginning-of-sequence token."""
    text, alone = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    first = next((i for i in range(len(text)) if text[i : i + len(alone)] == alone), 0)
    return "".join(map(str, tokenizer.convert_ids_to_tokens(text[:first])))
