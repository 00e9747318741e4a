"""The server's end of the stream of samples, with an engine that does what the test says."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.protocol.sample_stream import FrameError, Row, pack_aborts, pack_requests, unpack_rows
from dovetail.rollout.serving.routes import ServerState
from dovetail.rollout.serving.sample_connection import GivenUp, SampleConnection
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow  # vLLM's imports
PARAMS = {"max_tokens": 8, "logprobs": 0, "output_kind": 1, "stream_interval": 2}


class Engine:
    """An AsyncLLM whose requests give what `outputs` has for their ids. `None` waits until the request is ended."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Any]] = {}
        self.asked: dict[str, tuple[list[int], Any]] = {}
        self.aborted: dict[str, asyncio.Event] = {}
        self.given_up: list[str] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked[request_id] = prompt["prompt_token_ids"], params
        self.aborted[request_id] = asyncio.Event()
        try:
            for output in self.outputs[request_id]:
                if output is None:
                    await self.aborted[request_id].wait()
                elif isinstance(output, Exception):
                    raise output
                else:
                    yield SimpleNamespace(outputs=[output])
        except asyncio.CancelledError:
            self.given_up.append(request_id)
            raise

    async def abort(self, ids: list[str]) -> None:
        for request_id in ids:
            if request_id in self.aborted:
                self.aborted[request_id].set()


class Socket:
    """A WebSocket whose other end is the test."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.rows: list[Row] = []

    async def receive_bytes(self) -> bytes:
        message = await self.inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send_bytes(self, frame: bytes) -> None:
        self.outbox.put_nowait(frame)

    def draw(self, *ids: str, weights: int | None = 4, seconds: float = 0.0, **fields: Any) -> None:
        """Ask for samples, whose numbers are their places."""
        common = {"weights": weights, "sampling_params": PARAMS, **fields}
        self.ask([{"number": i, "request_id": name, **common} for i, name in enumerate(ids)], seconds)

    def ask(self, requests: Sequence[dict[str, Any]], seconds: float = 0.0) -> None:
        tokens = array("i", [1, 2])
        self.inbox.put_nowait(pack_requests([(json.dumps(each).encode(), tokens) for each in requests], seconds))

    async def row(self) -> Row:
        while not self.rows:
            self.rows += unpack_rows(await self.outbox.get())
        return self.rows.pop(0)


def output(tokens: list[int], reason: str | None = None, experts: Any = None) -> Any:
    logprobs = SimpleNamespace(logprobs=[-1.0 - token / 8 for token in tokens], start_indices=range(len(tokens)))
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason, routed_experts=experts)


def play(
    scenario: Callable[[Engine, Socket, ServerState], Awaitable[None]], ends: type[Exception] | None = None
) -> None:
    async def main() -> None:
        from fastapi import WebSocketDisconnect

        engine, socket, state = Engine(), Socket(), ServerState(weight_version=4)
        serving = asyncio.create_task(SampleConnection(engine, socket, state).serve())
        async with asyncio.timeout(PATIENCE):
            await scenario(engine, socket, state)
            if ends is None:
                socket.inbox.put_nowait(WebSocketDisconnect())
                await serving
            else:
                with pytest.raises(ends):
                    await serving

    asyncio.run(main())


def test_tokens_log_probabilities_and_reasons_of_many_samples() -> None:
    async def scenario(engine: Engine, socket: Socket, _: ServerState) -> None:
        experts = np.arange(6, dtype=np.uint8).reshape(3, 2, 1)
        engine.outputs = {"a": [output([5]), output([6, 7]), output([8], "stop", experts)], "b": [output([], "abort")]}
        socket.draw("a", "b", kv_transfer_params={"x": 1})
        rows: dict[int, list[Row]] = {0: [], 1: []}
        while not all(found and found[-1].reason for found in rows.values()):
            one = await socket.row()
            rows[one.number].append(one)
        assert [token for one in rows[0] for token in one.tokens] == [5, 6, 7, 8]
        assert [value for one in rows[0] for value in one.logprobs] == [-1.625, -1.75, -1.875, -2.0]
        assert rows[0][-1].reason == "stop"
        assert rows[0][-1].extra.startswith(b"\x93NUMPY")
        assert (rows[1][-1].reason, len(rows[1][-1].tokens)) == ("abort", 0)
        prompt, params = engine.asked["a"]
        assert (prompt, params.max_tokens, params.stream_interval) == ([1, 2], 8, 2)
        assert params.output_kind.name == "DELTA"
        assert params.extra_args == {"kv_transfer_params": {"x": 1}}

    play(scenario)


def test_a_request_is_ended_by_its_id_even_at_once() -> None:
    async def scenario(engine: Engine, socket: Socket, _: ServerState) -> None:
        engine.outputs = {"a": [None, output([], "abort")], "b": [output([5]), None]}
        socket.draw("a", "b")
        socket.inbox.put_nowait(pack_aborts(["a", "unknown"]))
        found = {one.number: one.reason for one in (await socket.row(), await socket.row())}
        assert found == {0: "abort", 1: None}

    play(scenario)


def test_samples_of_a_connection_that_ends_are_given_up() -> None:
    engines: list[Engine] = []

    async def scenario(engine: Engine, socket: Socket, _: ServerState) -> None:
        engine.outputs = {"a": [output([5]), None]}
        socket.draw("a")
        await socket.row()
        engines.append(engine)

    play(scenario)
    assert engines[0].given_up == ["a"]


@pytest.mark.parametrize(
    ("state", "weights", "says"),
    [
        ({"weight_version": 3}, 4, "this server holds version 3 of the weights, not 4"),
        ({"weight_version": None}, 4, "holds version None"),
        ({"weight_version": None}, None, "holds version None"),
        ({"weight_version": None, "paused_version": 4}, 4, "holds version None"),
        ({"asleep": True}, 4, "this server is asleep"),
    ],
)
def test_a_server_draws_only_with_the_weights_that_are_asked_for(
    state: dict[str, Any], weights: int | None, says: str
) -> None:
    async def scenario(engine: Engine, socket: Socket, held: ServerState) -> None:
        for name, value in state.items():
            setattr(held, name, value)
        socket.draw("a", weights=weights)
        one = await socket.row()
        assert one.reason == "failed"
        assert says in one.extra.decode()
        assert not engine.asked

    play(scenario)


def test_no_token_of_other_weights_leaves_the_server() -> None:
    """A request that reaches a paused engine is drawn after the update."""

    async def scenario(engine: Engine, socket: Socket, state: ServerState) -> None:
        engine.outputs = {"a": [output([5]), None, output([6]), output([7], "stop")]}
        socket.draw("a")
        assert (await socket.row()).reason is None
        state.pause()
        state.lose_weights()
        socket.inbox.put_nowait(pack_aborts(["a"]))
        one = await socket.row()
        assert (one.reason, len(one.tokens)) == ("failed", 0)

    play(scenario)


def test_tokens_that_were_drawn_before_a_pause_are_sent() -> None:
    async def scenario(engine: Engine, socket: Socket, state: ServerState) -> None:
        engine.outputs = {"a": [output([5]), None, output([6], "abort")]}
        socket.draw("a")
        await socket.row()
        state.pause()
        socket.inbox.put_nowait(pack_aborts(["a"]))
        one = await socket.row()
        assert (one.reason, list(one.tokens)) == ("abort", [6])

    play(scenario)


def test_a_wrong_request_is_refused_and_an_engines_error_is_not() -> None:
    async def scenario(engine: Engine, socket: Socket, _: ServerState) -> None:
        from vllm.exceptions import VLLMValidationError

        engine.outputs = {"b": [VLLMValidationError("the prompt is too long")], "c": [RuntimeError("broken")]}
        socket.draw("a", sampling_params={"max_tokens": "many"})
        first = await socket.row()
        socket.draw("b", "c")
        found = {one.number: one for one in (await socket.row(), await socket.row())}
        assert (first.reason, found[0].reason, found[1].reason) == ("refused", "refused", "failed")
        assert b"max_tokens" in first.extra
        assert found[0].extra == b"the prompt is too long"
        assert found[1].extra == b"RuntimeError: broken"

    play(scenario)


def test_an_error_amid_a_response_and_a_key_error_of_the_engine_are_no_refusals() -> None:
    async def scenario(engine: Engine, socket: Socket, _: ServerState) -> None:
        engine.outputs = {"a": [output([5]), ValueError("a page is lost")], "b": [KeyError("b")]}
        engine.outputs |= {"c": [ValueError("the prompt is empty")]}
        socket.draw("a", "b", "c")
        found: dict[int, Row] = {}
        while len(found) < 3:
            one = await socket.row()
            if one.reason is not None:
                found[one.number] = one
        assert [found[i].reason for i in range(3)] == ["failed", "failed", "refused"]
        assert found[0].extra == b"ValueError: a page is lost"

    play(scenario)


def test_a_request_without_a_field_is_refused_with_its_name() -> None:
    async def scenario(_: Engine, socket: Socket, __: ServerState) -> None:
        socket.ask([{"number": 0, "request_id": "a", "weights": 4}])
        one = await socket.row()
        assert (one.reason, one.extra) == ("refused", b"the request has no field 'sampling_params'")

    play(scenario)


def test_a_coordinator_that_takes_no_frame_is_given_up_with_the_reason() -> None:
    async def scenario(engine: Engine, socket: Socket, _: ServerState) -> None:
        async def send_bytes(_: bytes) -> None:
            raise TimeoutError

        socket.send_bytes = send_bytes  # type: ignore[method-assign]
        engine.outputs = {"a": [output([5]), None]}
        socket.draw("a")

    play(scenario, GivenUp)


def test_a_message_that_cannot_be_read_ends_the_connection() -> None:
    async def scenario(engine: Engine, socket: Socket, _: ServerState) -> None:
        socket.inbox.put_nowait(b"nothing of this protocol")

    play(scenario, FrameError)
