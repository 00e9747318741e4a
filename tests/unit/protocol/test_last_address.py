"""Name servers that are away for a while: who has talked to the coordinator goes on talking to it."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dovetail.protocol.http import last_address
from dovetail.protocol.http.last_address import LastAddress
from dovetail.protocol.messages import Heartbeat, JoinRequest
from dovetail.protocol.process.env import ProcessEnv
from dovetail.rollout.scoring import scorer
from dovetail.rollout.scoring.scorer_app import ScorerService
from dovetail.rollout.serving.register import Registrar
from dovetail.rollout.serving.routes import ServerState
from dovetail.trainer.rank.coordinator_client import CoordinatorClient, CoordinatorUnreachable
from helpers.free_ports import free_port
from helpers.patience import PATIENCE

NAME = "job-coordinator.space.svc"
BEAT = Heartbeat(name="trainer-0", rank=0, incarnation="a", generation=1)
JOIN = JoinRequest(name="trainer-0", rank=0, world_size=1, incarnation="a", host="127.0.0.1", port=1, nccl_version=None)
AWAY = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class Names:
    """The name servers. They know one name while `error` is None. `hang`: they do not answer until it is set."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.hang: threading.Event | None = None
        self.asked = 0
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != NAME:
            return self._real(host, port, *args, **options)
        self.asked += 1
        if self.hang is not None:
            self.hang.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self._real("127.0.0.1", port, *args, **options)


@pytest.fixture
def name_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    yield names
    if names.hang is not None:
        names.hang.set()


class Coordinator:
    """Answers every request with an empty reply, and counts them."""

    def __init__(self) -> None:
        self.requests = 0
        self.more = threading.Condition()
        coordinator = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")
                with coordinator.more:
                    coordinator.requests += 1
                    coordinator.more.notify_all()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def reaches(self, count: int) -> bool:
        with self.more:
            return self.more.wait_for(lambda: self.requests >= count, 60)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.close()


def test_a_rank_goes_on_with_the_last_address_while_no_name_server_answers(
    name_servers: Names, coordinator: Coordinator
) -> None:
    client = CoordinatorClient(f"http://{NAME}:{coordinator.port}", "secret", patience=0.0)
    assert client.heartbeat(BEAT) is not None
    name_servers.error = AWAY
    assert client.heartbeat(BEAT) is not None
    assert client.join(JOIN).generation is None
    name_servers.error = None
    assert client.heartbeat(BEAT) is not None


@pytest.mark.slow
def test_a_heartbeat_does_not_wait_for_a_name_server_that_is_silent(
    name_servers: Names, coordinator: Coordinator
) -> None:
    client = CoordinatorClient(f"http://{NAME}:{coordinator.port}", "secret", patience=0.0)
    assert client.heartbeat(BEAT) is not None
    name_servers.hang, asked = threading.Event(), name_servers.asked
    for _ in range(3):
        assert client.heartbeat(BEAT) is not None
    assert name_servers.asked == asked + 1, "one lookup at a time"


def test_a_rank_that_starts_without_name_servers_asks_them_again(name_servers: Names, coordinator: Coordinator) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            name_servers.error = None

    name_servers.error = AWAY
    client = CoordinatorClient(f"http://{NAME}:{coordinator.port}", "secret", patience=600.0, sleep=pause)
    assert client.join(JOIN).generation is None
    assert len(pauses) == 3
    name_servers.error = AWAY
    stranger = CoordinatorClient(f"http://{NAME}:{coordinator.port}", "secret", patience=0.0)
    with pytest.raises(CoordinatorUnreachable, match="Temporary failure in name resolution"):
        stranger.join(JOIN)


def test_a_server_registers_on_while_no_name_server_answers(
    name_servers: Names, coordinator: Coordinator, tmp_path: Path
) -> None:
    env = ProcessEnv(
        "job", "r0", tmp_path, f"http://{NAME}:{coordinator.port}", "secret", "127.0.0.1", free_port(), 0, "g", 0, 1
    )
    reporter = Registrar(env, ServerState(name="r0", incarnation="i"), 0.05)
    reporter.start()
    try:
        assert coordinator.reaches(1)
        name_servers.error = AWAY
        assert coordinator.reaches(coordinator.requests + 4)
    finally:
        reporter.stop()


def test_a_scorer_registers_on_while_no_name_server_answers(
    name_servers: Names, coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "REGISTER_SECONDS", 0.05)
    env = ProcessEnv(
        "job", "r0-scorer", tmp_path, f"http://{NAME}:{coordinator.port}", "secret", "127.0.0.1", 0, 0, "g", 0, 1
    )
    models = SimpleNamespace(critic_version=None, place="cpu", dtype="torch.float32", models={}, host=None, room=0)
    events: list[str] = []

    async def run() -> None:
        service = cast(ScorerService, SimpleNamespace(scorer=models))
        task = asyncio.create_task(
            scorer.register_forever(env, "http://127.0.0.1:1", "i", service, lambda event, **_: events.append(event))
        )
        try:
            assert await asyncio.to_thread(coordinator.reaches, 1)
            name_servers.error = AWAY
            # aiohttp keeps connections open, and asks no name server for these. (This coordinator closes each.)
            assert await asyncio.to_thread(coordinator.reaches, coordinator.requests + 4)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert events == ["coordinator.joined"]


def test_the_last_address_is_used_only_as_long_as_it_answers() -> None:
    now, found = [0.0], list[list[str] | OSError]([["10.0.0.1"]])

    def lookup(_: str) -> list[str]:
        if isinstance(said := found[-1], OSError):
            raise said
        return said

    address = LastAddress(NAME, lookup, lambda: now[0], wait=60, unknown=60)
    assert address.find() == ["10.0.0.1"]
    found.append(AWAY)
    for _ in range(10):
        now[0] += last_address.KEEP_SECONDS - 1
        assert address.find() == ["10.0.0.1"]
        address.answered()
    now[0] += last_address.KEEP_SECONDS + 1
    with pytest.raises(socket.gaierror, match="Temporary"):
        address.find()
    found.append(["10.0.0.2", "10.0.0.3"])
    assert address.find() == ["10.0.0.2", "10.0.0.3"]


def test_a_name_that_is_gone_is_an_answer() -> None:
    found: list[OSError] = []

    def lookup(_: str) -> list[str]:
        if found:
            raise found[0]
        return ["10.0.0.1"]

    address = LastAddress(NAME, lookup, wait=60, unknown=60)
    assert address.find() == ["10.0.0.1"]
    found.append(NO_SUCH_NAME)
    with pytest.raises(socket.gaierror, match="not known"):
        address.find()


def test_who_knows_no_address_waits_for_the_name_server_but_not_for_ever() -> None:
    hang = threading.Event()

    def lookup(_: str) -> list[str]:
        hang.wait(PATIENCE)
        return ["10.0.0.1"]

    address = LastAddress(NAME, lookup, wait=0.01, unknown=0.01)
    with pytest.raises(TimeoutError, match=f"no name server answers for {NAME}"):
        address.find()
    hang.set()
    address.settle()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert address.find() == ["10.0.0.1"]
            break
        except TimeoutError:
            continue
    else:
        pytest.fail("the address was never found")


def test_an_address_needs_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str) -> list[str]:
        raise AssertionError(host)

    assert LastAddress("127.0.0.1", lookup).find() == ["127.0.0.1"]
    assert LastAddress("fd00::1", lookup).find() == ["fd00::1"]
