"""Connections to servers whose sockets the test plays."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from dovetail.coordinator.samples import requests
from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.samples.requests import Connection, Requests, ServerFailure
from dovetail.protocol.sample_stream import Row, pack_rows, unpack_asked
from helpers.generation_job import until
from helpers.patience import PATIENCE

SETTINGS = GenerationSettings()
ERROR, BINARY = aiohttp.WSMsgType.ERROR, aiohttp.WSMsgType.BINARY


class Socket:
    """A WebSocket with a server, and the session that opened it. `sent` has what the coordinator sent: requests with
    the seconds between two frames, or ids."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        self.sent: list[Any] = []
        self.messages: list[bytes] = []
        self.broken = False

    async def __aenter__(self) -> Socket:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def exception(self) -> None:
        return None

    async def receive(self) -> aiohttp.WSMessage:
        return await self.inbox.get()

    async def send_bytes(self, message: bytes) -> None:
        if self.broken:
            raise ConnectionResetError("cut")
        self.messages.append(message)
        self.sent.append(unpack_asked(message))

    def end(self, number: int) -> None:
        frame = pack_rows([Row(number, array("i", [5]), array("f", [-1.0]), "stop")])
        self.inbox.put_nowait(aiohttp.WSMessage(BINARY, frame, None))


class Session:
    """`sockets` has each that was opened."""

    def __init__(self) -> None:
        self.sockets: list[Socket] = []

    async def ws_connect(self, *_: object, **__: object) -> Socket:
        self.sockets.append(Socket())
        return self.sockets[-1]

    async def close(self) -> None:
        pass


def body(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"request_id": name, "token_ids": array("i", [1, 2]), **fields}


def taken(*_: object) -> None:
    pass


def server(incarnation: str = "1", name: str = "r0") -> Any:
    """What is read of an `Instance`."""
    return SimpleNamespace(name=name, url=f"http://{name}", incarnation=incarnation)


def play(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Requests, Session, list[Any]], Awaitable[None]]) -> None:
    async def main() -> None:
        session, events = Session(), list[Any]()
        monkeypatch.setattr(requests, "client_session", lambda **_: session)
        drawn = Requests("token", SETTINGS, lambda event, **fields: events.append((event, fields)))
        async with asyncio.timeout(PATIENCE):
            await scenario(drawn, session, events)
            await drawn.close()

    asyncio.run(main())


async def opened(session: Session, count: int = 1) -> Socket:
    await until(lambda: len(session.sockets) >= count)
    return session.sockets[-1]


def test_a_request_that_cannot_be_sent_ends_the_connection_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(drawn: Requests, session: Session, _: list[Any]) -> None:
        with pytest.raises(ServerFailure, match="ValueError"):
            await drawn.draw(server(), body(token_ids=["no number"]), taken)
        task = asyncio.create_task(drawn.draw(server(), body(), taken))
        (await opened(session, 2)).end(0)
        await task

    play(monkeypatch, scenario)


def test_a_connection_that_is_cancelled_before_it_begins_fails_its_draws() -> None:
    async def main() -> None:
        connection = Connection(Session(), "http://r0", SETTINGS)  # type: ignore[arg-type]
        connection.task.cancel()
        with pytest.raises(ServerFailure):
            await asyncio.wait_for(connection.draw(body(), taken), PATIENCE)

    asyncio.run(main())


def test_a_draw_of_an_ended_process_leaves_the_connection_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(drawn: Requests, session: Session, _: list[Any]) -> None:
        answered = asyncio.create_task(drawn.draw(server("1"), body("a"), taken))
        unseen = asyncio.create_task(drawn.draw(server("1"), body("b"), taken))
        (await opened(session)).end(0)
        await answered
        new = asyncio.create_task(drawn.draw(server("2"), body("c"), taken))
        socket = await opened(session, 2)
        with pytest.raises(ServerFailure):
            await unseen
        with pytest.raises(ServerFailure, match="its process is gone"):
            await drawn.draw(server("1"), body("d"), taken)
        socket.end(0)
        await new
        assert len(session.sockets) == 2

    play(monkeypatch, scenario)


def test_a_server_that_answers_no_ping_is_named_as_such_and_unseen_requests_are_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(drawn: Requests, session: Session, _: list[Any]) -> None:
        error = aiohttp.ServerTimeoutError("No PONG received")
        first = asyncio.create_task(drawn.draw(server(), body(), taken))
        (await opened(session)).inbox.put_nowait(aiohttp.WSMessage(ERROR, error, None))
        with pytest.raises(ServerFailure, match="ServerTimeoutError: No PONG received"):
            await first
        answered = asyncio.create_task(drawn.draw(server(), body("a"), taken))
        unseen = asyncio.create_task(drawn.draw(server(), body("b"), taken))
        socket = await opened(session, 2)
        socket.end(0)
        await answered
        socket.inbox.put_nowait(aiohttp.WSMessage(ERROR, error, None))
        (await opened(session, 3)).end(0)
        await unseen

    play(monkeypatch, scenario)


def test_requests_are_sent_in_messages_that_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(drawn: Requests, session: Session, _: list[Any]) -> None:
        count, big = 3000, 20
        bodies = [body(str(i)) for i in range(count)] + [body(str(i), moved="x" * 2_000_000) for i in range(big)]
        tasks = [asyncio.create_task(drawn.draw(server(), each, taken)) for each in bodies]
        socket = await opened(session)
        await until(lambda: sum(len(asked) for asked, _ in socket.sent) == count + big)
        assert max(len(asked) for asked, _ in socket.sent) == 1024
        assert all(asked for asked, _ in socket.sent)
        assert max(len(message) for message in socket.messages) < 16 << 20
        await requests.cancel(tasks)

    play(monkeypatch, scenario)


def test_frames_come_as_often_as_the_samples_of_all_servers_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(drawn: Requests, session: Session, _: list[Any]) -> None:
        lone = asyncio.create_task(drawn.draw(server(name="r1"), body(), taken))
        tail = await opened(session)
        await until(lambda: len(tail.sent) == 1)
        alone = tail.sent[0][1]
        tasks = [asyncio.create_task(drawn.draw(server(), body(str(i)), taken)) for i in range(64)]
        busy = await opened(session, 2)
        await until(lambda: sum(len(asked) for asked, _ in busy.sent) == 64)
        await until(lambda: tail.sent[-1][1] > 30 * alone)
        assert busy.sent[-1][1] == tail.sent[-1][1]
        for number in range(64):
            busy.end(number)
        await asyncio.gather(*tasks)
        await until(lambda: tail.sent[-1][1] <= 2 * alone)
        assert [len(asked) for asked, _ in tail.sent][1:] == [0] * (len(tail.sent) - 1)
        tail.end(0)
        await lone

    play(monkeypatch, scenario)


def test_requests_that_shall_end_are_logged_once_they_are_sent_or_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(drawn: Requests, session: Session, events: list[Any]) -> None:
        drawn.abort(server(), ["a", "b"])
        assert not events
        socket = await opened(session)
        await until(lambda: ["a", "b"] in socket.sent)
        await until(lambda: len(events) == 1)
        socket.broken = True
        drawn.abort(server(), ["c"])
        await until(lambda: len(events) == 2)
        sent, lost = events
        assert sent == ("requests.aborted", {"instance": "r0", "requests": 2})
        assert lost == ("requests.abort_lost", {"instance": "r0", "requests": 1})

    play(monkeypatch, scenario)
