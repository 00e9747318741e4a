"""Conversations with tools in published templates: SFT learns what the assistant wrote and nothing else, and a session
sends and trains the same ids."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.formats import convert
from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.data.text.tokenize import Encoder, sft_batch
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.episode import Episode, Sampled
from helpers.chat_templates import NOT_LEARNT, TOOL_CONVERSATIONS, TOOLS, built, byte_tokens, shipped, with_ends

LIMIT = 100_000
# After a tool's answer, the prompt of this template opens no turn, but its conversations do.
OPENS_OTHERWISE = ("trl: diffusion_gemma_training",)


def published() -> dict[str, str]:
    return {name: template for name, (template, _) in shipped().items() if "tool_calls" in template}


def demonstration(tokenizer: Any, messages: list[dict[str, Any]]) -> Any:
    row = {"messages": messages, "tools": TOOLS}
    return convert(row, "Messages", "demonstrations", chat_format(tokenizer), "f:1")


@pytest.mark.slow
def test_only_what_the_assistant_wrote_is_learnt() -> None:
    seen = 0
    for name, template in published().items():
        tokenizer = with_ends(byte_tokens(), template)
        encoder = Encoder(tokenizer, LIMIT, LIMIT)
        for title, messages in TOOL_CONVERSATIONS.items():
            try:
                record = demonstration(tokenizer, messages)
            except DataError:
                continue
            seen += 1
            made = encoder.demonstration(record)
            mask = sft_batch([made], 0)["loss_mask"][0]
            learnt = tokenizer.decode([token for token, is_learnt in zip(made.tokens, mask, strict=True) if is_learnt])
            assert not [word for word in NOT_LEARNT if word in learnt], (name, title, learnt)
            for message in messages:
                if message["role"] == "assistant":
                    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
                    assert all(word in learnt for word in (message["content"], *names)), (name, title, learnt)
            answers = sum(message["role"] == "assistant" for message in messages)
            ends = [tokenizer.eos_token, *tokenizer.reply_ends]
            assert sum(learnt.count(end) for end in ends) in (answers, answers - 1), (name, title, learnt)
    assert seen > 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "first", "prepend"])
def test_a_session_sends_and_trains_the_ids_of_sft(kind: str) -> None:
    """The model writes what SFT would have learnt. Where the template appends, the episode is one sequence."""
    equal = set[str]()
    tokens = built(kind, adds=kind == "prepend")
    for name, template in published().items():
        tokenizer = with_ends(tokens, template)
        encoder, chat = Encoder(tokenizer, LIMIT, LIMIT), chat_format(tokenizer)
        for title, messages in TOOL_CONVERSATIONS.items():
            try:
                ids, spans = encoder.whole(demonstration(tokenizer, messages))
            except DataError:
                continue
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            prompts = [encoder.encode(chat.with_tools(TOOLS).prompt(messages[:i])) for i in turns]
            episode = Episode(Bridge(chat, tokenizer))
            for i, prompt, (start, end) in zip(turns, prompts, spans, strict=True):
                asked = episode.ask(messages[:i], TOOLS)
                assert asked.before is not None or asked.prompt == prompt
                episode.answer(asked, Sampled(ids[start:end], [-1.0] * (end - start), messages[i]))
            branches = episode.branches()
            assert sum(int(branch.learnt.sum()) for branch in branches) == sum(end - start for start, end in spans)
            # gpt-oss's prompt ends with a word. Some of these tokenizers make one token of it and of what follows.
            joined = any(ids[:start] != prompt for prompt, (start, _) in zip(prompts, spans, strict=True))
            if len(branches) == 1 and name not in OPENS_OTHERWISE and not joined:
                (branch,) = branches
                assert branch.tokens.tolist() == ids, (name, title)
                assert branch.learnt.tolist() == [any(a <= i < b for a, b in spans) for i in range(len(ids))]
                equal.add(f"{name} {title}")
    for name in ("qwen2_5", "qwen3", "qwen3_8", "llama3_1", "glm4moe", "gemma4", "lfm2_v2", "qwen3_vl"):
        assert f"trl: {name} once" in equal, "the template appends"
        assert f"trl: {name} one after the other" in equal
    assert len(equal) > 130


@pytest.mark.parametrize(
    ("name", "title", "reason"),
    [
        ("gemma4", "with words", "message 2 is in the text of the conversation among what the assistant says"),
        ("deepseekv3", "two questions", "is in the text of the conversation among what the assistant says"),
        ("deepseekv3", "one after the other", "is in the text of the conversation among what the assistant says"),
        (
            "gptoss",
            "two at once",
            "message 1 calls several tools, but the tokenizer's chat template does not write",
        ),
        ("lfm2", "once", "message 1 calls a tool, but the tokenizer's chat template does not write tool_calls"),
        ("llama3_1", "with words", "message 1 has the role assistant, and the tokenizer's chat template leaves its"),
    ],
)
def test_what_a_template_cannot_say_is_named(name: str, title: str, reason: str) -> None:
    template, _ = shipped()[f"trl: {name}"]
    with pytest.raises(DataError, match=rf"^f:1: .*{reason}"):
        demonstration(with_ends(byte_tokens(), template), TOOL_CONVERSATIONS[title])


def test_an_answer_that_repeats_a_tool_is_learnt() -> None:
    template, _ = shipped()["trl: qwen2_5"]
    messages = [*TOOL_CONVERSATIONS["once"][:-1], {"role": "assistant", "content": "It says TOOL10."}]
    record = demonstration(with_ends(byte_tokens(), template), messages)
    assert [part for part, learnt in record.parts() if learnt][-1] == "It says TOOL10.<|im_end|>"


@pytest.mark.slow
def test_a_thought_in_the_content_is_learnt_once() -> None:
    """Some templates write an empty thought before each content, and read a thought only in a field of its own."""

    def conversation(fields: bool) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for thought, words in (("It rains.", "Rain."), ("", "Snow."), ("Dry now.", "Dry.")):
            apart = {"content": words, "reasoning_content": thought}
            answer = apart if fields else {"content": f"<think>\n{thought}\n</think>\n\n{words}"}
            answers += [{"role": "user", "content": "Weather?"}, {"role": "assistant", **answer}]
        return answers

    tokens = built("bytes", adds=False)

    def learnt(name: str, fields: bool, count: int) -> list[str]:
        tokenizer = with_ends(tokens, shipped()[name][0])
        record = demonstration(tokenizer, conversation(fields)[:count])
        return [part for part, is_learnt in record.parts() if is_learnt]

    for name in ("trl: qwen3_8", "trl: qwen3_8_training"):
        for count in (2, 4, 6):
            assert learnt(name, False, count) == learnt(name, True, count)
    assert learnt("trl: qwen3_8", False, 2) == ["It rains.\n</think>\n\nRain.<|im_end|>"]
    for name in published():
        try:
            parts = learnt(name, False, 2)
        except DataError:
            continue
        assert sum(part.count("</think>") for part in parts) <= 1, name
