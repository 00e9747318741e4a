"""The rank's HTTP client and heartbeat, with clocks and answers made up."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.messages import (
    CommandResult,
    Heartbeat,
    HeartbeatReply,
    JoinRequest,
    NextReply,
    NextRequest,
    Save,
)
from dovetail.protocol.process.endings import SUPERSEDED
from dovetail.protocol.process.pulse import PULSE, Progress
from dovetail.trainer.rank import coordinator_client as client_module
from dovetail.trainer.rank import heartbeat
from dovetail.trainer.rank.coordinator_client import (
    CoordinatorClient,
    CoordinatorUnreachable,
    RankProcess,
    Refused,
    StaleGeneration,
)
from dovetail.trainer.rank.heartbeat import HeartbeatThread
from dovetail.trainer.rank.life import _Asking
from dovetail.trainer.weights.kept_weights import KeptWeights
from helpers.free_ports import free_port

JOIN = JoinRequest(name="trainer-0", rank=0, world_size=1, incarnation="a", host="127.0.0.1", port=1, nccl_version=None)


class Server:
    """Answers requests from a list of (status, body); the last one is repeated. With status 0 the body is all that is
    sent."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = [(200, b"{}")]
        self.requests: list[tuple[str, str, str | None, bytes]] = []
        self.pause = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.requests.append((self.command, self.path, self.headers.get("Authorization"), body))
                time.sleep(server.pause)
                status, data = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                if status == 0:  # a server that is killed after some bytes
                    self.wfile.write(data)
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_client(port: int, patience: float = 60.0) -> tuple[CoordinatorClient, Clock]:
    clock = Clock()
    return CoordinatorClient(f"http://127.0.0.1:{port}", "secret", patience, clock, clock.sleep), clock


def test_requests_carry_the_token_and_are_tried_again_after_a_5xx(server: Server) -> None:
    client, clock = make_client(server.port)
    server.answers = [(503, b"starting"), (500, b""), (200, json.dumps({"generation": 4}).encode())]
    assert client.join(JOIN).generation == 4
    assert len(server.requests) == 3
    assert {request[2] for request in server.requests} == {"Bearer secret"}
    assert 0 < clock.now < 1


HEAD = b"HTTP/1.1 200 OK\r\n"
LENGTH = b"Content-Length: 6\r\n\r\n"


@pytest.mark.parametrize("part", [HEAD, HEAD + LENGTH, HEAD + LENGTH + b"bat"])
def test_an_answer_that_breaks_off_is_asked_for_again(server: Server, part: bytes) -> None:
    """As when the coordinator is killed while it sends a batch."""
    client, _ = make_client(server.port)
    server.answers = [(0, part), (200, b"batch!")]
    assert client.batch("ppo/2") == b"batch!"
    assert len(server.requests) == 2


def test_an_absent_coordinator_is_waited_for_as_long_as_patience_lasts() -> None:
    client, clock = make_client(free_port("127.0.0.1"), patience=30.0)
    with pytest.raises(CoordinatorUnreachable, match="did not answer /v1/trainer/join for 30 s"):
        client.join(JOIN)
    assert 25 <= clock.now <= 30


def test_a_silent_address_is_given_up_sooner_than_a_slow_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Silent(client_module.CoordinatorConnection):
        def connect(self) -> None:
            waits.append(self.timeout)
            raise TimeoutError("timed out")

    monkeypatch.setattr(client_module, "CoordinatorConnection", Silent)
    client, _ = make_client(1, patience=10)
    with pytest.raises(CoordinatorUnreachable):
        client.join(JOIN)
    assert len(waits) > 1
    assert set(waits) == {client_module.CONNECT_TIMEOUT_SECONDS}


@pytest.mark.slow
def test_an_answer_may_take_longer_than_connecting(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_TIMEOUT_SECONDS", 0.2)
    server.pause = 0.5
    server.answers = [(200, b"late")]
    client, clock = make_client(server.port)
    assert client.batch("a") == b"late"
    assert clock.now == 0.0, "at the first attempt"


def test_conflict_and_refusal_are_told_apart(server: Server) -> None:
    client, _ = make_client(server.port)
    server.answers = [(409, b"generation 1 is over")]
    with pytest.raises(StaleGeneration, match="generation 1 is over"):
        client.next(NextRequest(generation=1), patience=1)
    server.answers = [(401, b"the job's token is missing or wrong")]
    with pytest.raises(Refused, match="HTTP 401 from /v1/batches/ppo/1: the job's token"):
        client.batch("ppo/1")
    server.answers = [(200, b"not json")]
    with pytest.raises(Refused, match="is not a JoinReply"):
        client.join(JOIN)


def test_answers_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = make_client(server.port)
    monkeypatch.setattr(client_module, "BATCH_LIMIT_BYTES", 10)
    server.answers = [(200, b"x" * 11)]
    with pytest.raises(Refused, match="larger than 10 bytes"):
        client.batch("sft/1")


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="must look like http://host:port"):
        CoordinatorClient("somewhere", "secret", 1.0)


# ---------------------------------------------------------------- rank 0's requests for work


class Runner:
    stage = None
    step = 0
    kept = KeptWeights()


def asked(server: Server) -> list[str | None]:
    """Ids of the results that were handed in, in order."""
    bodies = [json.loads(request[3]) for request in server.requests]
    return [None if body["result"] is None else body["result"]["id"] for body in bodies]


def reply(command: Save | None) -> tuple[int, bytes]:
    return 200, NextReply(command=command).model_dump_json().encode()


def test_a_result_is_handed_in_until_it_arrived_and_again_when_asked_for(server: Server) -> None:
    client, clock = make_client(server.port)
    asking = _Asking(client, 1, Runner(), clock)  # type: ignore[arg-type]
    save, later = Save(id="a", path="/x"), Save(id="b", path="/y")
    server.answers = [reply(save), (503, b""), reply(None), reply(save), reply(later)]
    assert asking.next() == save
    asking.done(CommandResult(id="a", ok=True))
    assert asking.next() is None
    assert asking.next() is None  # asked for `a` again: done already
    assert asking.next() == later
    assert asked(server) == [None, "a", "a", None, "a"]


def test_rank_0_gives_up_on_the_coordinator_only_after_the_whole_patience() -> None:
    client, clock = make_client(free_port("127.0.0.1"), patience=35.0)
    asking = _Asking(client, 1, Runner(), clock)  # type: ignore[arg-type]
    for _ in range(3):
        assert asking.next() is None  # a sign of life for the other ranks
    assert clock.now <= 30
    with pytest.raises(CoordinatorUnreachable):
        [asking.next() for _ in range(3)]
    assert 35 <= clock.now <= 50


# ---------------------------------------------------------------- heartbeat


class Beats:
    """Answers heartbeats with `generation`."""

    def __init__(self) -> None:
        self.generation: int | None = None
        self.running: str | None = None
        self.away = False
        self.heard = 0
        self.at = ""

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply | None:
        self.heard += 1
        self.at = beat.at
        return None if self.away else HeartbeatReply(generation=self.generation, running=self.running)


def make_heartbeat() -> tuple[HeartbeatThread, Beats, Clock, list[int]]:
    beats, clock, exits = Beats(), Clock(), []
    thread = HeartbeatThread(
        RankProcess("trainer-0", beats, lambda event, **fields: None),  # type: ignore[arg-type]
        0,
        "a",
        clock,
        exits.append,
    )
    return thread, beats, clock, exits


def test_the_pulse_beats_with_the_work_and_not_with_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, progress = tmp_path / "pulse", Progress(transferred=lambda: 0)
    mark.touch()
    monkeypatch.setenv(PULSE, str(mark))
    monkeypatch.setattr(heartbeat, "PROGRESS", progress)
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.01)
    thread, beats, _, _ = make_heartbeat()
    os.utime(mark, ns=(1, 1))

    def polls_until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def heard(more: int) -> Callable[[], bool]:
        before = beats.heard
        return lambda: beats.heard >= before + more

    thread.start()
    polls_until(heard(3))
    assert mark.stat().st_mtime_ns > 1, "it works"
    os.utime(mark, ns=(1, 1))
    polls_until(heard(5))
    assert mark.stat().st_mtime_ns == 1, "it waits for what never comes"
    monkeypatch.setattr(heartbeat, "STILL_BEATS", 2)

    def standing() -> int:
        """Called by the product, so that the main thread stands there until the coordinator has heard of it."""
        polls_until(lambda: beats.at.startswith("dovetail.protocol.process.pulse:") and beats.at.endswith(" in moved"))
        return 0

    Progress(transferred=standing).moved()
    os.utime(mark, ns=(1, 1))
    with progress.bounded():
        # It need not be ended, but others may wait for it.
        Progress(transferred=standing).moved()
        polls_until(lambda: mark.stat().st_mtime_ns > 1)
    os.utime(mark, ns=(1, 1))
    progress.made()
    polls_until(lambda: mark.stat().st_mtime_ns > 1)
    thread.stop()


def test_a_rank_stuck_in_a_generation_that_is_over_ends_after_its_grace() -> None:
    thread, beats, clock, exits = make_heartbeat()
    thread.enter(3, grace=20)
    beats.generation = 3
    thread.beat()
    assert not thread.superseded
    beats.generation = 4
    thread.beat()
    assert thread.superseded
    clock.now = 19
    beats.away = True
    thread.beat()
    assert exits == []
    clock.now = 21
    thread.beat()
    assert exits == [SUPERSEDED]


def test_a_rank_that_leaves_in_time_goes_on() -> None:
    thread, beats, clock, exits = make_heartbeat()
    thread.enter(3, grace=20)
    beats.generation = 4
    thread.beat()
    thread.leave()
    clock.now = 100
    thread.beat()
    thread.enter(4, grace=20)
    thread.beat()
    assert not thread.superseded
    assert exits == []


def test_an_absent_coordinator_supersedes_nothing() -> None:
    thread, beats, clock, exits = make_heartbeat()
    thread.enter(3, grace=20)
    beats.away = True
    clock.now = 1000
    thread.beat()
    assert not thread.superseded
    assert exits == []


def test_a_publish_that_the_coordinator_does_not_wait_for_is_given_up() -> None:
    """It died and came back: what its predecessor began, nobody will finish."""
    thread, beats, clock, _ = make_heartbeat()
    thread.enter(3, grace=20)
    beats.running = "publish/1"
    thread.beat()
    clock.now = 2
    assert not thread.cancelled("publish/2"), "the answer is older than the command"
    thread.beat()
    assert thread.cancelled("publish/2")
    beats.running = "publish/2"
    thread.beat()
    assert not thread.cancelled("publish/2")
    beats.away = True
    thread.beat()
    assert not thread.cancelled("publish/2"), "nobody answers: the coordinator may come back in time"
    beats.away, beats.running = False, ""
    thread.beat()
    assert thread.cancelled("publish/2")
