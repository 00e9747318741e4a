"""What the model wrote is read as the message that the template would have written so, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.formats import convert
from dovetail.coordinator.data.text.chat_template import HumanAssistant, chat_format
from dovetail.coordinator.data.text.tokenize import Encoder
from dovetail.coordinator.sessions.answer_reader import AnswerReader, Unreadable, WrongCall
from helpers.chat_templates import TOOL_CONVERSATIONS, TOOLS, byte_tokens, shipped, with_ends


def reader_of(name: str) -> AnswerReader:
    tokenizer = with_ends(byte_tokens(), shipped()[name][0])
    return AnswerReader.of(tokenizer, chat_format(tokenizer))


def read(name: str, text: str, before: str = "") -> dict[str, Any]:
    return reader_of(f"trl: {name}").read_text(before, text, TOOLS)


def called(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {city}}}}}\n</tool_call>'


TAGGED = "<tool_call>\n<function=weather>\n{}\n</function>\n</tool_call><|im_end|>"


def functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


@pytest.mark.slow
def test_every_template_is_read_rightly_or_refused() -> None:
    readable = set()
    for name, (template, _) in shipped().items():
        if "tool_calls" not in template:
            continue
        tokenizer = with_ends(byte_tokens(), template)
        chat = chat_format(tokenizer)
        try:
            reader = AnswerReader.of(tokenizer, chat)
        except Unreadable:
            continue
        readable.add(name.removeprefix("trl: "))
        for title, messages in TOOL_CONVERSATIONS.items():
            row = {"messages": messages, "tools": TOOLS}
            try:
                record: Any = convert(row, "Messages", "demonstrations", chat, "f:1")
            except DataError:
                continue
            ids, spans = Encoder(tokenizer, 100_000, 100_000).whole(record)
            answers = [message for message in messages if message["role"] == "assistant"]
            for (start, end), answer in zip(spans, answers, strict=True):
                found = reader.read(ids[:start], ids[start:end], TOOLS)
                assert (found["role"], found["content"]) == ("assistant", answer["content"]), (name, title)
                assert functions(found) == functions(answer), (name, title)
    for name in ("qwen2_5", "qwen3", "qwen3_8", "qwen3_vl", "llama3_1", "glm4moe", "nemotron_3_nano"):
        assert name in readable
    assert not readable & {"gemma4", "gptoss", "lfm2_v2"}


def test_a_tokenizer_may_say_itself_how_to_read() -> None:
    tokenizer = with_ends(byte_tokens(), shipped()["trl: gemma4"][0])
    with pytest.raises(
        Unreadable, match=r"calls as the tokenizer's chat template writes them .* a response_template, as"
    ):
        AnswerReader.of(tokenizer, chat_format(tokenizer))
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|turn>model\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<turn\|>|<\|tool_response>", "content": "text"},
        },
    }
    found = AnswerReader.of(tokenizer, chat_format(tokenizer)).read_text(
        "<|turn>model\n", '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|><|tool_response>', TOOLS
    )
    assert functions(found) == [{"name": "weather", "arguments": {"city": "Bern"}}]


def test_a_thought_is_apart_wherever_it_begins() -> None:
    for name, before, text in (
        ("qwen3", "<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nNo.<|im_end|>"),
        ("qwen3_6", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nNo.<|im_end|>"),
    ):
        found = read(name, text, before)
        assert found == {"role": "assistant", "reasoning_content": "hm", "content": "No."}, name


@pytest.mark.parametrize(
    ("name", "before", "text", "thought", "content"),
    [
        ("qwen3", "", "Write <think> and </think>.<|im_end|>", None, "Write <think> and </think>."),
        ("qwen3", "", "\n<think>\nhm<|im_end|>", "hm", ""),
        ("qwen3_6", "<think>\n", "hm<|im_end|>", "hm", ""),
        ("qwen3_6", "<think>\n", "hm <think> hm\n</think>\n\nNo.<|im_end|>", "hm <think> hm", "No."),
        ("qwen3_6", "<think>\n\n</think>\n\n", "<think>hm</think>No.<|im_end|>", None, "<think>hm</think>No."),
        ("qwen3_6", "<think>\n\n</think>\n\n", "No <think>.<|im_end|>", None, "No <think>."),
        ("glm4moe", "", "<think>hm<|user|>", "hm", ""),
    ],
)
def test_a_thought_begins_the_turn_and_ends_with_it(
    name: str, before: str, text: str, thought: str | None, content: str
) -> None:
    opened = "<|assistant|>\n" if name == "glm4moe" else "<|im_start|>assistant\n"
    found = read(name, text, opened + before)
    assert (found.get("reasoning_content"), found["content"]) == (thought, content)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_6", "glm4moe"])
def test_words_around_calls_are_kept(name: str) -> None:
    call, end = {
        "qwen2_5": (called('"Bern"'), "<|im_end|>"),
        "qwen3_6": (TAGGED.format("<parameter=city>\nBern\n</parameter>").removesuffix("<|im_end|>"), "<|im_end|>"),
        "glm4moe": (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
            "<|observation|>",
        ),
    }[name]
    found = read(name, f"First.\n{call}\nThen.\n{call}\n{call}\nLast.{end}")
    assert found["content"] == "First.\nThen.\nLast."
    assert functions(found) == [{"name": "weather", "arguments": {"city": "Bern"}}] * 3


def test_arguments_have_the_kinds_of_the_schema() -> None:
    text = (
        "<parameter=city>\n5\n</parameter>\n<parameter=days>\n5\n</parameter>\n<parameter=exact>\nfalse\n</parameter>"
    )
    found = read("qwen3_6", f"<tool_call>\n<function=weather>\n{text}\n</function>\n</tool_call><|im_end|>")
    assert functions(found) == [{"name": "weather", "arguments": {"city": "5", "days": 5, "exact": False}}]


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("qwen3_6", "<parameter=city>"),
        ("qwen3_6", "<parameter="),
        ("qwen3_6", "<parameter=city>\n\n"),
        ("glm4moe", "<arg_key>city</arg_key>\n<arg_value>"),
        ("glm4moe", "<arg_key>"),
    ],
)
def test_a_model_that_repeats_itself_is_read_at_once(name: str, opening: str) -> None:
    text = TAGGED if name == "qwen3_6" else "<tool_call>weather\n{}</tool_call><|user|>"
    with pytest.raises(WrongCall, match="an argument of weather has no name or no end"):
        read(name, text.format(opening * 20_000))


@pytest.mark.parametrize("name", ["qwen3_6", "glm4moe"])
def test_white_space_without_end_is_read_at_once(name: str) -> None:
    assert read(name, "No." + "\n" * 500_000 + "No.")["content"].strip("No.").isspace()


def test_an_argument_may_say_what_opens_one() -> None:
    text = "<parameter=city>\n<b> <parameter=days> 5\n</parameter>"
    assert functions(read("qwen3_6", TAGGED.format(text))) == [
        {"name": "weather", "arguments": {"city": "<b> <parameter=days> 5"}}
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}\n</tool_call>',
            "the call cannot be read: json",
        ),
        ('<tool_call>\n{"arguments": {"city": "Bern"}}\n</tool_call>', "the call cannot be read: .*name"),
        ('<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', "a call has no name"),
        (
            '<tool_call>\n{"name": "weather", "arguments": "Bern"}\n</tool_call>',
            "the arguments of weather are no object",
        ),
        ('<tool_call>\n["weather"]\n</tool_call>', "the call cannot be read"),
        ("<tool_call>\n", "the call cannot be read"),
        (called("[" * 70 + "]" * 70), "the call has more than 64 objects and lists in each other"),
        (called('{"a":' * 70 + "1" + "}" * 70), "the call has more than 64 objects and lists in each other"),
        (called("[" * 100_000), "the call has more than 64 objects and lists in each other"),
        (called(r'"\ud800"'), "the call has half of a character"),
        (called('"Bern"').replace("city", r"\udfff"), "the call has half of a character"),
        (called('"Bern"').replace("weather", r"\udfff"), "the call has half of a character"),
    ],
)
def test_a_wrong_call_is_told_to_the_model(text: str, why: str) -> None:
    with pytest.raises(WrongCall, match=why):
        read("qwen2_5", text + "<|im_end|>")


def test_what_has_no_calls_is_named() -> None:
    plain = with_ends(byte_tokens(), "{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    for chat in (chat_format(plain), HumanAssistant("", "</s>")):
        with pytest.raises(Unreadable, match="the tokenizer's chat template writes no call of a tool: message 1"):
            AnswerReader.of(plain, chat)
