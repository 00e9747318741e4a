"""An episode's ledger: what was sampled is never encoded again, and is learnt once."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.data.text.chat_template import HumanAssistant, TemplateRefused, chat_format
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.episode import Episode, ModelExchange, Sampled
from helpers.chat_templates import TOOLS, byte_tokens, said, shipped, with_ends

Messages = list[dict[str, Any]]
ASKED = said("user", "USER1?")


@functools.cache
def tokenizer(name: str = "qwen3") -> Any:
    return with_ends(byte_tokens(), shipped()[f"trl: {name}"][0])


def episode(name: str = "qwen3") -> Episode:
    return Episode(Bridge(chat_format(tokenizer(name)), tokenizer(name)))


def ids(text: str, name: str = "qwen3") -> list[int]:
    """The ids of each character of a text. A tokenizer would write fewer."""
    made = tokenizer(name)
    special = {token.content for token in made.added_tokens_decoder.values()}
    found: list[int] = []
    while text:
        piece = next((each for each in special if text.startswith(each)), text[0])
        found += made(piece, add_special_tokens=False)["input_ids"]
        text = text[len(piece) :]
    return found


def call(arguments: str, number: int = 0, content: str = "", thought: str = "") -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.loads(arguments)}
    made = said(
        "assistant", content, tool_calls=[{"type": "function", "id": f"call{number:05d}", "function": function}]
    )
    return made | ({"reasoning_content": thought} if thought else {})


def written(message: dict[str, Any], arguments: str = "", end: str = "<|im_end|>") -> str:
    """What the model wrote, with its own spelling of the arguments."""
    thought = message.get("reasoning_content")
    text = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + message["content"]
    if arguments:
        text += f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    return text + end


def answer(
    made: Episode, asked: ModelExchange, message: dict[str, Any], arguments: str = "", ended: bool = True
) -> Sampled:
    tokens = ids(written(message, arguments, "<|im_end|>" if ended else ""))
    found = Sampled(tokens, np.arange(len(tokens), dtype=np.float64).tolist(), message, ended)
    made.answer(asked, found)
    return found


SPELT = '{"city":"Bern","exact":false,"days":3.0}'


def test_the_models_spelling_of_a_call_stays() -> None:
    """A template would write the arguments with spaces, and a tokenizer the text with fewer tokens."""
    made, message = episode(), call(SPELT)
    first = made.ask([ASKED], TOOLS)
    sampled = answer(made, first, message, SPELT)
    second = made.ask([ASKED, message, said("tool", "dry", tool_call_id="call00000")], TOOLS)
    assert second.before is first
    assert second.prompt[: len(first.prompt)] == first.prompt
    after = second.prompt[len(first.prompt) :]
    assert after[: len(sampled.tokens)] == sampled.tokens
    new = "\n<|im_start|>user\n<tool_response>\ndry\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer().decode(after[len(sampled.tokens) :]) == new
    last = answer(made, second, said("assistant", "No."))
    (branch,) = made.branches()
    assert branch.tokens.tolist() == [*second.prompt, *last.tokens]
    assert branch.tokens[branch.learnt].tolist() == [*sampled.tokens, *last.tokens]
    assert branch.logprobs[branch.learnt].tolist() == [*sampled.logprobs, *last.logprobs]
    assert not branch.logprobs[~branch.learnt].any()
    assert branch.prompt_length == len(first.prompt)


def test_an_agent_that_sends_less_back_goes_on() -> None:
    """OpenAI's clients send no thought, and may write the arguments of a call and its id anew."""
    made, message = episode(), call(SPELT, thought="the user asks")
    first = made.ask([ASKED], TOOLS)
    answer(made, first, message, SPELT)
    function = {"arguments": {"days": 3.0, "exact": False, "city": "Bern"}, "name": "weather"}
    sent = said("assistant", "", tool_calls=[{"id": "other", "function": function}])
    second = made.ask([ASKED, sent, said("tool", "dry", tool_call_id="other")], TOOLS)
    assert second.before is first


def test_a_request_that_is_sent_again_is_the_same() -> None:
    made, message = episode(), call(SPELT)
    first = made.ask([ASKED], TOOLS)
    assert made.ask([dict(ASKED)], list(TOOLS)) is first
    answer(made, first, message, SPELT)
    asked = [ASKED, message, said("tool", "dry")]
    assert made.ask(asked, TOOLS) is made.ask(asked, TOOLS)
    assert made.ask(asked, TOOLS[:1]) is not made.ask(asked, TOOLS), "other tools are another prompt"


def test_a_thought_that_the_template_leaves_out_begins_a_branch() -> None:
    """Qwen3 forgets what it thought as soon as the user says something."""
    made, message = episode(), said("assistant", "No.", reasoning_content="dry, I think")
    first = made.ask([ASKED])
    sampled = answer(made, first, message)
    messages = [ASKED, message, said("user", "USER2?")]
    second = made.ask(messages)
    assert second.before is None
    text = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "think" not in text
    assert second.prompt == tokenizer()(text, add_special_tokens=False)["input_ids"]
    last = answer(made, second, said("assistant", "Yes."))
    one, other = made.branches()
    learnt = sorted(branch.tokens[branch.learnt].tolist() for branch in (one, other))
    assert learnt == sorted([list(sampled.tokens), list(last.tokens)])


@pytest.mark.parametrize(("thought", "sampled"), [("", "<think>\n\n</think>\n\nNo."), ("why", "<think>why</think>No.")])
def test_an_empty_thought_is_a_thought_too(thought: str, sampled: str) -> None:
    made = episode()
    first = made.ask([ASKED])
    message = said("assistant", "No.") | ({"reasoning_content": thought} if thought else {})
    tokens = ids(sampled + "<|im_end|>")
    made.answer(first, Sampled(tokens, [-1.0] * len(tokens), message))
    assert made.ask([ASKED, message, said("user", "USER2?")]).before is None


def test_an_agent_that_rewrites_its_history_begins_a_branch() -> None:
    made, message = episode("qwen2_5"), said("assistant", "No.")
    first = made.ask([ASKED])
    answer(made, first, message)
    more = said("user", "USER2?")
    for messages in (
        [said("user", "USER0?"), message, more],
        [ASKED, said("assistant", "Yes."), more],
        [said("system", "SYSTEM"), ASKED, message, more],
    ):
        asked = made.ask(messages)
        assert asked.before is None, messages
        assert asked.prompt == ids_of("qwen2_5", messages)
    assert made.ask([ASKED, message, more]).before is first


def ids_of(name: str, messages: Messages) -> list[int]:
    text = tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(name)(text, add_special_tokens=False)["input_ids"])


def test_a_turn_that_was_cut_is_not_continued() -> None:
    made, message = episode("qwen2_5"), said("assistant", "No")
    answer(made, made.ask([ASKED]), message, ended=False)
    assert made.ask([ASKED, message, said("user", "USER2?")]).before is None


def test_agents_of_an_agent_share_what_came_before() -> None:
    """The shared turn is learnt once, whichever of them asks first."""
    message = call(SPELT)
    found = []
    for order in ((1, 2), (2, 1)):
        made = episode()
        answer(made, made.ask([ASKED], TOOLS), message, SPELT)
        for n in order:
            asked = made.ask([ASKED, message, said("tool", f"dry{n}")], TOOLS)
            answer(made, asked, said("assistant", f"No{n}."))
        found.append(made.branches())
    for one, other in zip(*found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.learnt.tolist() == other.learnt.tolist()
    first, second = found[0]
    assert tokenizer().decode(first.tokens[first.learnt]).startswith("<tool_call>")
    assert tokenizer().decode(second.tokens[second.learnt]) == "No2.<|im_end|>"


def test_without_a_template_each_turn_is_a_branch() -> None:
    plain = tokenizer("qwen2_5")
    made = Episode(Bridge(HumanAssistant("", plain.eos_token), plain))
    message = said("assistant", " No.")
    answer(made, made.ask([ASKED]), message)
    second = made.ask([ASKED, message, said("user", "USER2?")])
    assert second.before is None
    assert plain.decode(second.prompt).endswith("\n\nHuman: USER2?\n\nAssistant:")


def test_what_cannot_be_is_refused() -> None:
    made = episode()
    first = made.ask([ASKED])
    with pytest.raises(ValueError, match="2 tokens and 1 log-prob"):
        made.answer(first, Sampled([1, 2], [0.0], said("assistant", "")))
    answer(made, first, said("assistant", "No."))
    with pytest.raises(ValueError, match="another answer already"):
        answer(made, first, said("assistant", "Yes."))
    strict = Episode(Bridge(chat_format(tokenizer("llama3_1")), tokenizer("llama3_1")))
    calls = [*call(SPELT)["tool_calls"], *call(SPELT, 1)["tool_calls"]]
    with pytest.raises(TemplateRefused, match="single tool-calls"):
        strict.ask([ASKED, said("assistant", "", tool_calls=calls), said("tool", "dry")], TOOLS)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["tool", "user", "edit", "again"]),
        st.integers(0, 3),
        st.booleans(),
        st.booleans(),
        st.sampled_from([SPELT, '{"city": "Bern"}', '{ "city":"Bern", "exact" : true}']),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None)
@given(STEPS)
def test_every_sampled_token_is_learnt_once_as_it_was_sampled(steps: list[tuple[str, int, bool, bool, str]]) -> None:
    check(steps)


@pytest.mark.slow
@pytest.mark.nightly
@settings(max_examples=1000, deadline=None)
@given(STEPS)
def test_it_is_so_in_a_thousand_episodes(steps: list[tuple[str, int, bool, bool, str]]) -> None:
    check(steps)


def check(steps: list[tuple[str, int, bool, bool, str]]) -> None:
    """Whatever agent, model and template do: forks, rewritten messages, thoughts that are left out, turns that are
    cut."""
    made = episode()
    turns: list[Messages] = [[ASKED]]
    sampled: dict[int, int] = {}
    for kind, back, thinks, ends, arguments in steps:
        messages = turns[max(0, len(turns) - 1 - back)]
        asked = made.ask(messages, TOOLS)
        if asked.answer is None:
            thought = "hm" if thinks else ""
            message = call(arguments, len(sampled), thought=thought)
            tokens = ids(written(message, arguments, "<|im_end|>" if ends else ""))
            places = range(len(sampled), len(sampled) + len(tokens))
            sampled |= dict(zip(places, tokens, strict=True))
            made.answer(asked, Sampled(tokens, [float(-n) for n in places], message, ends))
        if asked.before is not None:
            earlier = asked.before.answer
            assert earlier is not None
            assert earlier.ended
            start = len(asked.before.prompt)
            assert asked.prompt[:start] == asked.before.prompt
            assert asked.prompt[start : start + len(earlier.tokens)] == list(earlier.tokens)
        else:
            assert "hm" not in tokenizer().decode(asked.prompt) or messages[-1]["role"] == "tool"
        assert asked.answer is not None
        if kind == "edit":
            turns.append([said("user", f"USER{len(turns)}?"), *messages[1:], asked.answer.message, said("tool", "dry")])
        elif kind != "again":
            turns.append([*messages, asked.answer.message, said(kind, f"SAYS{len(turns)}")])
    learnt = list[tuple[int, int]]()
    for branch in made.branches():
        places = (-branch.logprobs[branch.learnt]).astype(int).tolist()
        learnt += zip(places, branch.tokens[branch.learnt].tolist(), strict=True)
    assert sorted(learnt) == sorted(sampled.items())
