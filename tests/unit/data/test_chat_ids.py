"""The token ids of chats: those of transformers' apply_chat_template, and learnt is what the model must say there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2 import TemplateError

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.formats import convert, detect
from dovetail.coordinator.data.text.chat_template import Template, chat_format, human_assistant_template
from dovetail.coordinator.data.text.tokenize import Encoder, sft_batch
from dovetail.manifest.fixed_names import DataKind
from helpers.chat_templates import KINDS, built, byte_tokens, shipped, with_template

Messages = list[dict[str, Any]]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set first = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (first if loop.first else '')"
    " + m['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim"
    " + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}"
    "{% else %}{{ ('' if m['role'] == 'system' else '<|User|>') + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# Qwen3's templates write an empty thought before the last answer. The thinking ones open it in the prompt.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set thought = m['reasoning_content'] or '' %}{% if '</think>' in c %}"
    "{% set thought = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{ c + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Today: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% if loop.last and m['thinking'] %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m['thinking'] + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The names of published templates of these shapes, with their end token.
SHAPES = {
    "SmolLM2": (CHATML, "<|im_end|>"),
    "OLMo 2": ("{{ bos_token }}" + TAGS, "</s>"),
    "TinyLlama": (TAGS, "</s>"),
    "Zephyr": ("{{ bos_token }}" + TAGS, "</s>"),
    "Llama 2": (LLAMA2, "</s>"),
    "Llama 3": (LLAMA3, "<|eot_id|>"),
    "Mistral": (MISTRAL, "</s>"),
    "Gemma": (GEMMA, "</s>"),
    "Phi-3": (PHI3, "</s>"),
    "DeepSeek R1": (R1, "</s>"),
    "Qwen3": (QWEN3, "<|im_end|>"),
    "Qwen3 Thinking": (
        QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"),
        "<|im_end|>",
    ),
    "gpt-oss": (HARMONY, "<|return|>"),
    "Hermes": (TOOLS, "<|im_end|>"),
    "SmolLM3": (MARKED, "<|im_end|>"),
}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
# As DeepSeek's templates want it.
AS_TEXT = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
ASKED = [say("user", "What is two plus three?"), say("user", "the cat?"), say("user", "the fur?"), say("user", "dry?")]
ANSWERS = [say("assistant", text) for text in ("It is 5.", "small", "the cat has small fur", " 5")]


def conversations() -> Iterator[Messages]:
    for count in (1, 2, 4):
        turns = list(itertools.chain(*zip(ASKED[:count], ANSWERS, strict=False)))
        yield turns
        yield [say("system", "Be kind."), *turns]
    yield [ASKED[0], say("assistant", "<think>\nthe cat\n</think>\n\nIt is 5.")]
    yield [ASKED[0], say("assistant", "It is 5.", reasoning_content="the cat")]
    yield [ASKED[3], say("assistant", "", tool_calls=[CALL]), say("tool", "dry", tool_call_id="abcdefghi"), ANSWERS[0]]


def ids(found: Any) -> list[int]:
    return list(found if isinstance(found, list) else found["input_ids"])


def opens_a_thought(tokenizer: Any) -> bool:
    """Whether an answer begins in a thought, as in DeepSeek R1. An answer without one is refused there."""
    asked = str(tokenizer.apply_chat_template(ASKED[:1], add_generation_prompt=True, tokenize=False))
    return asked.rstrip().endswith("<think>")


def writes(tokenizer: Any, text: str, messages: Messages, tools: Any = None) -> bool:
    """Whether the template takes the messages as they are. Templates of models of images (Idefics 3, LLaVA) may take
    lists only, and those of DeepSeek want calls as texts."""
    try:
        return text in tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception:  # a template may raise any error
        return False


@pytest.mark.slow
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_apply_chat_template(kind: str, adds: bool) -> None:
    """For every template, every kind of tokenizer and every conversation, or the record is refused. (All templates that
    the packages ship meet the three tokenizers that differ most.)"""
    written, tokens = 0, built(kind, adds)
    every = shipped() if (kind, adds) in (("bytes", False), ("prepend", True), ("wordpiece", True)) else {}
    for name, (template, end) in (SHAPES | every).items():
        tokenizer = with_template(tokens, template, end)
        encoder = Encoder(tokenizer, 10_000, 10_000)
        for messages in conversations():
            tools = [TOOL] if any("tool_calls" in message for message in messages) else None
            row = {"messages": messages, "tools": tools}
            chat = chat_format(tokenizer)
            try:
                record: Any = convert(row, "Messages", "demonstrations", chat, "f:1")
                asked: Any = convert({**row, "messages": messages[:-1]}, "Messages", "prompts", chat, "f:1")
            except DataError:
                plain = messages[0]["role"] == "user" and not any(
                    word in str(messages) for word in ("think", "reas", "tool")
                )
                # The template of Kimi Audio takes conversations, and no messages.
                assert not plain or opens_a_thought(tokenizer) or "conversations[0]" in template, (name, messages)
                continue
            written += 1
            given = [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in messages]
            if not writes(tokenizer, ASKED[0]["content"], [*ASKED[:1], *ANSWERS[:1]]):
                given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in given]
            elif tools and not writes(tokenizer, "Bern", given, tools):
                given = [{**m, "content": None, "tool_calls": [AS_TEXT]} if "tool_calls" in m else m for m in given]
            prompt = ids(
                tokenizer.apply_chat_template(given[:-1], tools=tools, add_generation_prompt=True, tokenize=True)
            )
            whole = ids(tokenizer.apply_chat_template(given, tools=tools, tokenize=True))
            assert encoder.prompt(asked.prompt) == prompt, (name, messages)
            made = encoder.demonstration(record)
            # The last end token is the end. A template may lack one, and some leave out the thought that is learnt.
            # Those of Nemotron open a thought otherwise in a prompt than in a turn. The prompt's ids then count.
            thought = "think" in str(messages) or "reasoning" in str(messages) or "nemotron" in name
            if not (opens_a_thought(tokenizer) and thought):
                common = [*whole, tokenizer.eos_token_id][: len(made.tokens)]
                assert made.tokens == common, (name, messages, tokenizer.decode(made.tokens))
            assert made.tokens[-1] == tokenizer.eos_token_id
            batch = sft_batch([made], 0)
            learnt = [i for i in range(len(made.tokens)) if batch["loss_mask"][0][i]]
            text = "".join(part for part, is_learnt in record.parts() if is_learnt)
            for message in messages:
                assert message["role"] != "assistant" or message["content"].split("</think>")[-1].strip() in text
            for message in messages:
                assert message["role"] == "assistant" or message["content"] not in text
            # Only white space may belong to a token on both sides of the place where the model begins.
            begin = max(i for i in range(len(made.tokens)) if i in learnt and i - 1 not in learnt)
            agree = next((i for i, (a, b) in enumerate(zip(prompt, made.tokens, strict=False)) if a != b), len(prompt))
            # (Unigram makes one unknown token of all neighbours that it does not know.)
            assert begin >= agree - (made.tokens[begin] == tokenizer.unk_token_id), (name, messages)
            # Where the template marks what is learnt, its marks decide.
            marked = re.search(r"\{%-? *generation", template)
            assert begin <= len(prompt) or agree < len(prompt) or marked, (name, messages)
    assert written > (500 if every else 60)


@pytest.mark.parametrize("kind", KINDS)
def test_models_without_a_template_are_served_the_ids_of_training(kind: str) -> None:
    for adds in (True, False):
        tokens = built(kind, adds)
        plain, exported = with_template(tokens, None, "</s>"), with_template(tokens, None, "</s>")
        exported.chat_template = human_assistant_template(plain)
        encoder, chat = Encoder(plain, 10_000, 10_000), chat_format(plain)
        opened = [say("system", "Be kind."), ASKED[0], ANSWERS[0], ASKED[1]]
        for messages in ([ASKED[0]], opened, [say("developer", "Be kind."), ASKED[0]]):
            served = ids(exported.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))
            assert encoder.prompt(chat.prompt(messages)) == served
            whole = ids(exported.apply_chat_template([*messages, ANSWERS[0]], tokenize=True))
            record: Any = convert({"messages": [*messages, ANSWERS[0]]}, "Messages", "demonstrations", chat, "f:1")
            assert encoder.demonstration(record).tokens == [*whole, 2]
        with pytest.raises(TemplateError, match="the role tool is not system, user or assistant"):
            exported.apply_chat_template([ASKED[0], say("tool", "dry")], tokenize=True)
        raw = encoder.encode("the cat")
        assert raw == [i for n, i in enumerate(ids(plain("the cat"))) if n == 0 or i != 2]
        pair: Any = convert(
            {"prompt": "the cat", "response": " has fur"}, "PromptResponse", "demonstrations", chat, "f"
        )
        assert encoder.demonstration(pair).tokens == [*encoder.encode("the cat has fur"), 2]


# A call as DeepSeek's templates write it: the content is null, and the arguments are a text.
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{{ '<|Assistant|>' }}"
    "{% for call in m['tool_calls'] %}{{ call['type'] + ':' + call['function']['name'] + '\n```json\n'"
    " + call['function']['arguments'] + '\n```' }}{% endfor %}{{ '</s>' }}"
    "{% else %}{{ ('<|Assistant|>' if m['role'] == 'assistant' else '<|User|>') + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)
# As templates of models of images. A text would be written as nothing.
PARTS = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] }}{% for part in m['content'] if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endfor %}{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}"
    "{% endif %}"
)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
def test_calls_are_given_as_the_template_wants_them(arguments: Any, flat: bool) -> None:
    named = {"name": "weather", "arguments": arguments}
    call = named if flat else {**CALL, "function": named}
    messages = [ASKED[3], say("assistant", "", tool_calls=[call]), say("tool", "dry"), ANSWERS[0]]
    whole = read(messages, DEEPSEEK)
    given = [ASKED[3], say("assistant", "", tool_calls=[call]), *messages[2:]]
    given[1]["content"] = None
    given[1]["tool_calls"] = [{**CALL, "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}]
    assert whole.text == with_template(byte_tokens(), DEEPSEEK, "</s>").apply_chat_template(given, tokenize=False)
    assert responses(whole) == ['function:weather\n```json\n{"city": "Zürich"}\n```</s>', "It is 5.</s>"]


def test_a_template_that_takes_only_parts_gets_them() -> None:
    tokenizer = with_template(byte_tokens(), PARTS, "</s>")
    messages = [say("system", "Be kind."), ASKED[0], ANSWERS[0], ASKED[1], ANSWERS[1]]
    given = [say(m["role"], m["content"]) | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    whole = read(messages, PARTS)
    assert whole.text == tokenizer.apply_chat_template(given, tokenize=False)
    assert responses(whole) == ["It is 5.</s>", "small</s>"]
    asked = read(messages[:-1], PARTS, kind="prompts")
    assert asked.prompt == tokenizer.apply_chat_template(given[:-1], add_generation_prompt=True, tokenize=False)


def read(messages: Messages, template: str, end: str = "</s>", kind: DataKind = "demonstrations", **fields: Any) -> Any:
    chat = chat_format(with_template(byte_tokens(), template, end))
    row = {"messages": messages, **fields}
    return convert(row, detect(row, "f:1"), kind, chat, "f:1")


def responses(record: Any) -> list[str]:
    return [part for part, learnt in record.parts() if learnt]


@pytest.mark.parametrize(
    ("name", "learnt"),
    [
        ("Phi-3", ["It is 5.<|end|>\n", "small<|end|>\n</s>"]),
        ("gpt-oss", [f"<|channel|>final<|message|>{said}" for said in ("It is 5.", "small<|return|>")]),
        ("Zephyr", ["It is 5.</s>", "small</s>"]),
        ("Qwen3", ["It is 5.<|im_end|>", "<think>\n\n</think>\n\nsmall<|im_end|>"]),
        ("Qwen3 Thinking", ["It is 5.<|im_end|>", "\n</think>\n\nsmall<|im_end|>"]),
        ("SmolLM3", ["It is 5.<|im_end|>", "small<|im_end|>"]),
    ],
)
def test_turns_that_a_longer_conversation_closes_otherwise_are_learnt(name: str, learnt: list[str]) -> None:
    assert responses(read([ASKED[0], ANSWERS[0], ASKED[1], ANSWERS[1]], *SHAPES[name])) == learnt


def test_a_thought_is_opened_once() -> None:
    thought = say("assistant", "<think>\nthe cat\n</think>\n\n5")
    field = say("assistant", "5", reasoning="the cat")
    for said in (thought, field):
        for name in ("DeepSeek R1", "Qwen3 Thinking"):
            record = read([ASKED[0], said], *SHAPES[name])
            assert record.prompt.endswith("<think>\n")
            assert responses(record) == [f"the cat\n</think>\n\n5{SHAPES[name][1]}"]
    earlier = read([ASKED[0], ANSWERS[0], ASKED[1], thought], *SHAPES["DeepSeek R1"])
    assert responses(earlier)[0] == "It is 5.</s>"
    with pytest.raises(DataError, match=r"^f:1: message 1 does not begin with '<think>', as the tokenizer's chat"):
        read(ASKED[:1] + ANSWERS[:1], *SHAPES["DeepSeek R1"])
    empty = read([ASKED[0], say("assistant", "<think>\n</think>\n\n5")], *SHAPES["DeepSeek R1"])
    assert responses(empty) == ["</think>\n\n5</s>"]
    with pytest.raises(DataError, match=r"message 1 is not in the text of the whole conversation"):
        read([ASKED[0], thought, ASKED[1], ANSWERS[1]], *SHAPES["Qwen3"])
    with pytest.raises(
        DataError, match=r"message 1 has a thought, but the tokenizer's chat template does not write it"
    ):
        read([ASKED[0], field], *SHAPES["Zephyr"])
    pair = {"chosen": [ASKED[0], thought], "rejected": [ASKED[0], say("assistant", "<think>\n</think>\n\n6")]}
    chat = chat_format(with_template(byte_tokens(), *SHAPES["DeepSeek R1"]))
    found: Any = convert(pair, "ChosenRejected", "preferences", chat, "f:1")
    assert (found.prompt[-8:], found.chosen, found.rejected) == (
        "<think>\n",
        "the cat\n</think>\n\n5</s>",
        "</think>\n\n6</s>",
    )


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
def test_what_a_template_leaves_out_is_refused(kind: DataKind) -> None:
    called = [ASKED[0], say("assistant", "", tool_calls=[CALL]), say("tool", "dry"), ANSWERS[0]]
    with pytest.raises(
        DataError, match=r"^f:1: message 1 calls a tool, but the tokenizer's chat template does not write"
    ):
        read(called, CHATML, kind=kind)
    system = [say("system", "Be kind."), say("user", "dry?"), ANSWERS[0]]
    users = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"message 0 has the role system, and the tokenizer's chat template leaves its"):
        read(system, users, kind=kind)
    with pytest.raises(DataError, match=r"template refuses the conversation: it leaves the system prompt out$"):
        read(system[1:], users, kind=kind, system="Be kind.")
    with pytest.raises(DataError, match=r"^f:1: message 1 calls a tool"):
        read(called, CHATML, kind=kind, system="Be kind.")
    nothing = "{% for m in messages %}[{{ m.role }}]{% endfor %}"
    with pytest.raises(DataError, match=r"message 0 has the role user, and the tokenizer's chat template leaves its"):
        read(system[1:], nothing, kind=kind)


def test_the_ends_of_the_model_end_a_turn() -> None:
    """Gemma's end token is not that of its turns, which its generation_config.json names."""
    tokenizer = with_template(byte_tokens(), GEMMA, "</s>")
    assert responses(
        convert({"messages": ASKED[:1] + ANSWERS[:1]}, "Messages", "demonstrations", Template(tokenizer), "f")
    ) == ["It is 5.<end_of_turn>\n</s>"]
    tokenizer.reply_ends = ["<end_of_turn>"]
    record: Any = convert({"messages": ASKED[:1] + ANSWERS[:1]}, "Messages", "demonstrations", Template(tokenizer), "f")
    assert responses(record) == ["It is 5.<end_of_turn>"]
