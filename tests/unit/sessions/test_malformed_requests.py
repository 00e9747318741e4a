"""What agents send that is not as it should be: it gets one sentence with status 400, and the episode goes on."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.sessions.agent import AgentEpisode, AgentPlayer
from dovetail.coordinator.sessions.answer_reader import written_turn
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.chat_routes import ChatRoutes
from dovetail.coordinator.sessions.play import AskedTurn, SampledTurn
from dovetail.coordinator.store.samples import Key
from dovetail.manifest.training_types import Generation
from helpers.chat_templates import byte_tokens, said, shipped, with_ends

_FUNCTION = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
_USUAL: dict[str, Any] = {
    "model": "gpt-4o",
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "metadata": {"a": "b"},
}
# A request at each route that has all which may be wrong.
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_USUAL,
        "messages": [
            said("system", "Add well."),
            {"role": "user", "content": [{"type": "text", "text": "Add."}], "name": "me"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Easy.",
                "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c0", "content": "2"},
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
            {"role": "function", "name": "add", "content": "3"},
            said("user", "Go on."),
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "stop": ["never"],
        "max_tokens": 100,
        "max_completion_tokens": 100,
        "n": 1,
        "logit_bias": {},
        "functions": [],
        "frequency_penalty": 0.5,
        "logprobs": True,
        "seed": 3,
    },
    "/v1/responses": {
        **_USUAL,
        "instructions": "Add well.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
            {"type": "reasoning", "id": "r0", "summary": [], "content": [{"type": "reasoning_text", "text": "Easy."}]},
            {"type": "function_call", "call_id": "c0", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c0", "output": "2"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "2"}]},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [{"type": "function", **_FUNCTION}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "previous_response_id": None,
        "conversation": None,
        "max_output_tokens": 100,
        "store": False,
    },
    "/inference/v1/generate": {
        "model": "actor",
        "token_ids": [1, 2, 3],
        "stream": False,
        "sampling_params": {"max_tokens": 5, "temperature": 0.5, "logprobs": 1, "stop_token_ids": [1], "seed": 1},
    },
    "/v1/reward": {"reward": 0.5},
}
_LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.just(10**400) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a request has a value that may be another one."""
    yield above
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in named:
        yield from places(inner, (*above, name))


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def changed(request: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    made = copy.copy(request)
    made[place[0]] = changed(request[place[0]], place[1:], value)
    return made


TEMPLATES = ["trl: qwen2_5", "trl: qwen3", "trl: llama3_1"]
CHANGES = st.sampled_from([(route, place) for route, asked in REQUESTS.items() for place in places(asked)])


@cache
def player(template: str) -> tuple[AgentPlayer, list[int]]:
    """A player, and the ids of a turn in which the model makes the first call of the request."""
    tokens = with_ends(byte_tokens(), shipped()[template][0])
    chat = chat_format(tokens)
    function = {"name": "add", "arguments": {"a": 1}}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return AgentPlayer.of(Bridge(chat, tokens), tokens, chat, 8), tokens(written_turn(chat, calls))["input_ids"]


async def answered(template: str, route: str, body: Any) -> tuple[int, str]:
    """The status of the answer to a request, and its text. Before it the model made the call that is in REQUESTS, so
    the conversation goes on with it. The episode goes on afterwards, too, and ends well."""
    routes, over = ChatRoutes(Generation(), 4096, lambda event, **note: json.dumps(note)), asyncio.Event()
    (plays, says), key = player(template), asyncio.get_running_loop().create_future()

    async def agent(its: str) -> None:
        key.set_result(its)
        await over.wait()

    async def policy(asked: AskedTurn) -> SampledTurn:
        ids = says if len(asked.exchange.messages) == 2 else says[-1:]
        return SampledTurn(ids, [-1.0] * len(ids), True)

    episode = AgentEpisode(agent, 1000.0, routes.episodes)
    playing = asyncio.create_task(plays.play(Key(1, 0, 0), 0, [], episode, policy))
    async with TestClient(TestServer(routes.app())) as client:
        headers = {"Authorization": f"Bearer {await key}", "Content-Type": "application/json"}

        async def sent(where: str, what: Any) -> tuple[int, str]:
            async with client.post(where, data=json.dumps(what), headers=headers) as found:
                return found.status, await found.text()

        chat, usual = "/v1/chat/completions", REQUESTS["/v1/chat/completions"]
        opening = {**usual, "messages": usual["messages"][:2]}
        assert (await sent(chat, opening))[0] == 200
        status, text = await sent(route, body)
        assert (await sent(chat, opening | {"messages": [said("user", "Go on.")]}))[0] == 200
    over.set()
    assert (await playing).calls == 1
    return status, text


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("route", REQUESTS)
def test_a_request_that_is_as_it_should_be_is_answered(template: str, route: str) -> None:
    status, text = asyncio.run(answered(template, route, REQUESTS[route]))
    assert status == 200, text


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@given(change=CHANGES, value=VALUES)
@example(change=("/v1/reward", ("reward",)), value=10**400)
@example(change=("/v1/chat/completions", ("stream_options",)), value=["x"])
@example(change=("/v1/responses", ("text",)), value="x")
@example(change=("/inference/v1/generate", ("sampling_params",)), value="x")
def test_whatever_is_wrong_with_a_request_is_told_in_one_sentence(template: str, change: Any, value: Any) -> None:
    route, place = change
    status, text = asyncio.run(answered(template, route, changed(REQUESTS[route], place, value)))
    assert status in (200, 400), (status, text)
    if status == 400:
        error = json.loads(text)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] == " ".join(error["message"].split()) != ""


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", [("messages", 2, "tool_calls", 0, "function"), ("tools", 0, "function")])
def test_what_is_too_deep_to_be_written_again_is_refused(template: str, place: tuple[Any, ...]) -> None:
    route, name = "/v1/chat/completions", "arguments" if "tool_calls" in place else "parameters"
    for depth, expected in ((60, 200), (80, 400), (600, 400), (900, 400)):
        text = nested(depth)
        for value in {"arguments": [text, json.loads(text)], "parameters": [json.loads(text)]}[name]:
            status, told = asyncio.run(answered(template, route, changed(REQUESTS[route], (*place, name), value)))
            assert status == expected, told
            assert status == 200 or "more than 72 objects and lists in each other" in told


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_id_that_the_tokenizer_does_not_know_is_refused(template: str) -> None:
    route = "/inference/v1/generate"
    status, told = asyncio.run(answered(template, route, REQUESTS[route] | {"token_ids": [1, 10**6]}))
    assert status == 400
    assert "token_ids has 1000000, but the tokenizer's ids end at " in told
