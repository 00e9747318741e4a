"""Turns dialogues into text, in the Human/Assistant format or with the tokenizer's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

HUMAN = "\n\nHuman: "
ASSISTANT = "\n\nAssistant:"
_HEADS = {"user": HUMAN, "human": HUMAN, "assistant": ASSISTANT + " ", "gpt": ASSISTANT + " ", "system": "\n\nSystem: "}
ASSISTANTS = ("assistant", "gpt")

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

# role and content are texts. An assistant's message may have tool_calls and its reasoning. A tool's message names the
# call that it answers.
Message = dict[str, Any]

# The Human/Assistant format as a chat template. It begins with a beginning-of-sequence token if the tokenizer writes
# one.
HUMAN_ASSISTANT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- '\\n\\nHuman: ' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{- '\\n\\nAssistant: ' + message['content'] }}"
    "{%- elif message['role'] == 'system' %}{{- '\\n\\nSystem: ' + message['content'] }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\n\\nAssistant:' }}{%- endif %}"
)


def human_assistant_template(tokenizer: Any) -> str:
    """The Human/Assistant format as a chat template for this tokenizer. It is for models whose tokenizer has no
    template."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return ("{{- bos_token }}" if begins else "") + HUMAN_ASSISTANT_TEMPLATE


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


class NoTools(ValueError):
    """The conversation calls tools, but its format cannot write calls. The message is one sentence."""


class ChatFormat(Protocol):
    """Turns messages (role, content) into text. Methods raise TemplateRefused and NoTools."""

    @property
    def shows_tools(self) -> bool:
        """Whether the text says which tools there are."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        """The same format for a conversation in which the assistant has these tools: function schemas, as in OpenAI's
        API."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text up to the point where the assistant's next turn begins."""

    def reply(self, messages: Sequence[Message], answer: Message | str) -> str:
        """The text of `answer`, the assistant's next turn, without the end-of-sequence token. If `answer` is a string,
        it is the content of the message."""

    def turn_length(self, messages: Sequence[Message], answer: Message, rest: str) -> int | None:
        """The length in characters of the assistant's turn `answer` in a longer conversation. It includes the text that
        closes the turn. The turn follows `messages`.

        `rest` is the conversation's text after `prompt(messages)`. Returns None if `rest` does not begin with the
        turn."""


class HumanAssistant:
    """Anthropic's format of the hh-rlhf data set."""

    shows_tools = False

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        return self

    def prompt(self, messages: Sequence[Message]) -> str:
        for message in messages:
            _refuse_calls(message)
        return "".join(_HEADS[m["role"]] + m["content"] for m in messages) + ASSISTANT

    def reply(self, messages: Sequence[Message], answer: Message | str) -> str:
        turn = _turn(answer)
        _refuse_calls(turn)
        return " " + str(turn["content"])

    def turn_length(self, messages: Sequence[Message], answer: Message, rest: str) -> int | None:
        text = self.reply(messages, answer)
        return len(text) if rest.startswith(text) else None


def _turn(answer: Message | str) -> Message:
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def _refuse_calls(message: Message) -> None:
    if message["role"] == "tool" or "tool_calls" in message:
        raise NoTools(
            "the conversation calls a tool, but the tokenizer has no chat template that could write it; take a "
            "tokenizer with one, or remove the record"
        )


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
        if any(message["role"] == "system" for message in messages):
            return list(messages)
        return [{"role": "system", "content": self._system}, *messages]

    def prompt(self, messages: Sequence[Message]) -> str:
        return self.chat.prompt(self._opened(messages))

    def reply(self, messages: Sequence[Message], answer: Message | str) -> str:
        return self.chat.reply(self._opened(messages), answer)

    def turn_length(self, messages: Sequence[Message], answer: Message, rest: str) -> int | None:
        return self.chat.turn_length(self._opened(messages), answer, rest)


class Template:
    """The chat template of a Hugging Face tokenizer. It gets the function schemas in `tools`."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)

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
        return Template(self._tokenizer, tools)

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        if self._tools:
            options["tools"] = self._tools
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:  # a template may raise any error, such as for a system message
            raise TemplateRefused(" ".join(str(error).split()) or type(error).__name__) from error

    def prompt(self, messages: Sequence[Message]) -> str:
        return self._without_bos(self._render(messages, add_generation_prompt=True))

    def reply(self, messages: Sequence[Message], answer: Message | str) -> str:
        text = self._written(messages, _turn(answer))
        end = self._tokenizer.eos_token
        stripped = text.rstrip()
        return stripped.removesuffix(end) if end and stripped.endswith(end) else text

    def _written(self, messages: Sequence[Message], answer: Message) -> str:
        """The assistant's turn as the end of a conversation, with the text that closes it."""
        before = self._render(messages, add_generation_prompt=True)
        whole = self._render([*messages, answer])
        if whole.startswith(before):
            return whole[len(before) :]
        if "tool_calls" in answer:
            raise TemplateRefused("it writes the assistant's call of a tool differently from where an answer begins")
        # Some templates write the generation prompt differently from the turn itself. Then the plain text is the reply.
        return str(answer["content"])

    def turn_length(self, messages: Sequence[Message], answer: Message, rest: str) -> int | None:
        # Templates of reasoning models write other text before the last answer than before earlier ones.
        said, last = str(answer["content"]).strip(), self._written(messages, answer)
        if said not in rest or said not in last:
            return None
        head, opening = rest[: rest.index(said)], last[: last.index(said)]
        if head.strip() and head != opening:
            return None
        closing, end = last[len(opening) + len(said) :], self._tokenizer.eos_token
        if end and closing.rstrip().endswith(end):
            closing = closing.rstrip()
        return len(head + said + closing) if rest.startswith(head + said + closing) else None

    def _without_bos(self, text: str) -> str:
        """The text without a beginning-of-sequence token, because tokenization adds it."""
        bos = self._tokenizer.bos_token
        return text.removeprefix(bos) if bos else text


def chat_format(tokenizer: Any | None) -> ChatFormat:
    """The format for a tokenizer. It is the chat template if the tokenizer has one, otherwise Human/Assistant."""
    return Template(tokenizer) if getattr(tokenizer, "chat_template", None) else HumanAssistant()
