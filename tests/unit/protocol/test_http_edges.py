"""The edges of the job's HTTP servers: whatever comes in, with a token or without, is answered by a sentence or closed,
never by a traceback."""

from __future__ import annotations

import asyncio
import json
import string
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from dovetail.coordinator.reporting.run_records import Timeline
from dovetail.coordinator.reporting.telemetry import MetricsHistory
from dovetail.coordinator.serving.coordinator_routes import PIECE_BYTES, make_app
from dovetail.coordinator.serving.served_batches import Batches
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.trainer_group import TrainerGroup
from dovetail.protocol.http import client_session, serving
from dovetail.protocol.http.header_deadline import CLIENT_KEEP_SECONDS, SERVER_KEEP_SECONDS, HeaderDeadline
from dovetail.protocol.messages import Offer, Register
from dovetail.protocol.wire import CONTENT_TYPE, pack
from dovetail.rollout.scoring import scorer_app
from dovetail.rollout.scoring.forward_passes import ModelScorer
from dovetail.rollout.scoring.scorer_app import ScorerService
from dovetail.trainer.rank.metrics import MetricsServer
from helpers.fake_jobs_api import Api
from helpers.fake_kube import ServerThread
from helpers.patience import PATIENCE
from helpers.scorers import ref, samples

TOKEN = "the-jobs-own"


class Host:
    """A coordinator's own parts behind its routes."""

    async def batch(self, key: str) -> bytes:
        return await Batches(self.prepared, self.files, self.store).fetch(key)

    def __init__(self, folder: Path) -> None:
        self.history, self.timeline, self.files = MetricsHistory(folder), Timeline(folder), ExperienceFiles(folder)
        self.fleet = Fleet(lambda: 0.0, lambda *_, **__: None)
        self.prepared: Any = type(
            "Prepared",
            (),
            {
                "sft_batch": lambda _, n: [][n],
                "reward_batch": lambda _, n: [][n],
                "dpo_batch": lambda _, n: [][n],
                "sft_eval_batches": lambda _: [],
                "reward_eval_batches": lambda _: [],
                "dpo_eval_batches": lambda _: [],
                "scored_demonstrations": lambda _: [],
            },
        )()
        self.trainers = TrainerGroup(
            world_size=1,
            generation=1,
            formed=False,
            peer_timeout=30.0,
            clock=lambda: 0.0,
            record_generation=lambda _: None,
            record_result=lambda _: None,
            log=lambda *_, **__: None,
        )

        self.store: Any = {}

    def register(self, message: Register) -> None:
        self.fleet.register(message)

    def retire(self, name: str, host: str | None = None) -> None:
        self.fleet.retire(name, host)

    def left(self, name: str) -> bool:
        return True

    def offer(self, _: Offer) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {}

    def history_since(self, offset: int) -> dict[str, Any]:
        return self.history.since(offset)

    def trace(self, iteration: int) -> bytes:
        return self.timeline.read(iteration)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a coordinator, a scorer, a status API and a rank's metrics. They give up half requests after half a second."""
    patch = pytest.MonkeyPatch()
    patch.setattr(HeaderDeadline, "header_seconds", 0.5)
    patch.setattr(ServerThread, "runner", lambda _, app: serving.Runner(app, header_seconds=0.5, shutdown_timeout=0.1))
    host = Host(tmp_path_factory.mktemp("run"))
    service = ScorerService(ModelScorer(["cpu"]), lambda *_, **__: None)
    service.scorer.load({"reference": ref("lm", 0)})
    coordinator = ServerThread(make_app(host, TOKEN, CollectorRegistry()))  # type: ignore[arg-type]
    scorer = ServerThread(scorer_app.make_app(service, TOKEN))
    api = Api(tmp_path_factory.mktemp("api"), patch)
    metrics = MetricsServer(("127.0.0.1", 0), CollectorRegistry(), seconds=0.5)
    metrics.start()
    yield {"coordinator": coordinator.port, "scorer": scorer.port, "api": api.port, "metrics": metrics.server_port}
    metrics.shutdown()
    metrics.server_close()
    coordinator.close()
    scorer.close()
    service.close()
    api.close()
    patch.undo()


async def exchange(port: int, sent: bytes, seconds: float = 60, whole: bool = True) -> bytes:
    """What the server says until it closes the connection, or its first line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read() if whole else reader.readline(), seconds)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def answer(port: int, sent: bytes, whole: bool = True) -> bytes:
    """What the server says to a whole request. On a busy machine half a second may pass before it has read the request,
    and it closes the connection: then it is asked again."""
    for _ in range(20):
        if reply := asyncio.run(exchange(port, sent, whole=whole)):
            return reply
    raise AssertionError("twenty requests in a row were not answered")


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


PATHS = {"coordinator": "/v1/status", "scorer": "/v1/info", "api": "/api/v1/namespaces/lab/rlhfjobs"}


@pytest.mark.parametrize("server", PATHS)
@pytest.mark.parametrize("header", [b"Bearer \xff", b"\xff\xfe", b"Bearer " + b"a" * 4000, b"Basic eA==", b""])
def test_any_authorization_is_judged(ports: dict[str, int], server: str, header: bytes) -> None:
    request = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: %s\r\n\r\n"
    reply = answer(ports[server], request % (PATHS[server].encode(), header))
    assert status(reply) == 401
    assert b"Traceback" not in reply


@pytest.mark.slow
@pytest.mark.parametrize("server", [*PATHS, "metrics"])
@pytest.mark.parametrize("sent", [b"", b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_half_requests_are_closed(ports: dict[str, int], server: str, sent: bytes) -> None:
    """Else a few thousand of them take all of a server's file handles, without any token."""
    reply = asyncio.run(exchange(ports[server], sent))
    assert not reply.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
@pytest.mark.parametrize("server", [*PATHS, "metrics"])
def test_headers_that_come_byte_by_byte_are_closed(ports: dict[str, int], server: str) -> None:
    """A limit for each byte would be no limit."""

    async def drip() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[server])
        writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        closed = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(PATIENCE):
            while not closed.done():
                writer.write(b"x")
                await asyncio.wait([closed], timeout=0.1)
        writer.close()
        assert closed.exception() is not None or not closed.result().startswith(b"HTTP/1.1 200")

    asyncio.run(drip())


@pytest.mark.parametrize("server", ["coordinator", "scorer"])
def test_half_bodies_are_given_up(ports: dict[str, int], server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BODY_SECONDS", 0.2)
    path = {"coordinator": "/v1/heartbeat", "scorer": "/v1/load"}[server]
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n{{"
    assert status(answer(ports[server], head.encode(), whole=False)) == 408


# ---------------------------------------------------------------- with a token

WORDS = st.text(string.printable + "ÿ\u0661\u2028", max_size=12)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(["", "-1", "0x1", "1e999", "nan", "-inf", "9" * 5000, "٣", "1_0", " 1", "null", "0", "-0.0"]),
    WORDS,
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), WORDS)
ANYTHING = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(WORDS, x, max_size=3), max_leaves=6
)


def quoted(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "".join(f"%{b:02x}" for b in c.encode()) for c in text)


def like(example: dict[str, Any]) -> Any:
    """Documents like the example, some of their values anything."""
    values = {key: st.one_of(st.just(value), ANYTHING) for key, value in example.items()}
    return st.one_of(st.fixed_dictionaries(values), ANYTHING).map(lambda document: json.dumps(document).encode())


JOIN = {"name": "t", "rank": 0, "world_size": 1, "incarnation": "a", "host": "127.0.0.1", "port": 1}
BEAT = {"name": "t", "rank": 0, "incarnation": "a", "generation": 1}
INSTANCE = {"name": "r", "kind": "rollout", "group": "g", "url": "http://x", "incarnation": "a", "ready": True}
INSTANCE |= {"weight_version": 1, "abilities": {}}
OFFER: dict[str, Any] = {"version": 1, "epoch": 1, "backend": "gloo", "segments": [], "deadline_seconds": 1.0}
LOAD = {"models": {"reference": {"head": "lm", "path": "/nowhere"}}}
SCORES = st.one_of(
    st.binary(max_size=64), st.just(pack(samples())), st.binary(max_size=8).map(lambda b: b + pack(samples()))
)

COORDINATOR = st.one_of(
    st.tuples(st.just("GET"), NUMBERS.map(lambda n: f"/v1/history?offset={quoted(n)}"), st.just(b"")),
    st.tuples(st.just("GET"), NUMBERS.map(lambda n: f"/v1/traces/{quoted(n)}"), st.just(b"")),
    st.tuples(
        st.just("GET"),
        st.tuples(
            st.sampled_from(["sft", "reward", "ppo", "sft-eval", "reward-eval", "demonstrations", "x", "../.."]),
            NUMBERS,
        ).map(lambda p: f"/v1/batches/{quoted(p[0])}/{quoted(p[1])}"),
        st.just(b""),
    ),
    st.tuples(st.just("DELETE"), NUMBERS.map(lambda n: f"/v1/instances/r?wait={quoted(n)}"), st.just(b"")),
    st.tuples(st.just("DELETE"), WORDS.map(lambda w: f"/v1/instances/{quoted(w)}"), st.just(b"")),
    st.tuples(st.just("POST"), st.just("/v1/heartbeat"), like(BEAT)),
    st.tuples(st.just("POST"), st.just("/v1/trainer/join"), like(JOIN | {"world_size": 2})),
    st.tuples(st.just("POST"), st.just("/v1/trainer/next"), like({"generation": 9, "result": None, "step": 0})),
    st.tuples(st.just("POST"), st.just("/v1/instances"), like(INSTANCE)),
    st.tuples(st.just("POST"), st.just("/v1/weights/offer"), like(OFFER)),
    st.tuples(
        st.sampled_from(["GET", "POST", "PUT", "X"]), WORDS.map(lambda w: f"/{quoted(w)}"), st.binary(max_size=9)
    ),
)
SCORER = st.one_of(
    st.tuples(
        st.just("POST"),
        st.tuples(NUMBERS, st.one_of(st.just("reference"), WORDS)).map(
            lambda p: f"/v1/score?temperature={quoted(p[0])}&want={quoted(p[1])}"
        ),
        SCORES,
    ),
    st.tuples(st.just("POST"), st.just("/v1/score?want=reference"), SCORES),
    st.tuples(st.just("POST"), st.just("/v1/load"), like(LOAD)),
    st.tuples(st.just("POST"), st.just("/v1/weights"), like({"offer": OFFER, "rank_offset": 1, "world_size": 2})),
)
BASE = "/api/v1/namespaces/lab/rlhfjobs"
API = st.one_of(
    st.tuples(st.just("GET"), NUMBERS.map(lambda n: f"{BASE}/job/iterations?after={quoted(n)}"), st.just(b"")),
    st.tuples(st.just("GET"), NUMBERS.map(lambda n: f"{BASE}/job/iterations?limit={quoted(n)}"), st.just(b"")),
    st.tuples(st.just("GET"), NUMBERS.map(lambda n: f"{BASE}/job/iterations/{quoted(n)}/trace"), st.just(b"")),
    st.tuples(st.just("GET"), NUMBERS.map(lambda n: f"{BASE}?limit={quoted(n)}&continue=0"), st.just(b"")),
    st.tuples(st.just("GET"), NUMBERS.map(lambda n: f"{BASE}/job/logs/job-0?lines={quoted(n)}"), st.just(b"")),
    st.tuples(
        st.just("GET"),
        st.tuples(st.sampled_from(["history", "samples", "evaluation", "sample/1/1", "samples/1/rows"]), NUMBERS).map(
            lambda p: f"{BASE}/job/run/{p[0]}/{quoted(p[1])}"
        ),
        st.just(b""),
    ),
    st.tuples(st.just("GET"), WORDS.map(lambda w: f"{BASE}/{quoted(w)}"), st.just(b"")),
    st.tuples(st.just("GET"), WORDS.map(lambda w: f"{BASE}/job/logs/{quoted(w)}"), st.just(b"")),
)


def ask(port: int, asked: tuple[str, str, bytes], token: str) -> bytes:
    method, path, body = asked
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n"
    return answer(port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "requests", "token"),
    [("coordinator", COORDINATOR, TOKEN), ("scorer", SCORER, TOKEN), ("api", API, "ada-token")],
)
def test_whatever_is_asked_is_answered_by_a_sentence(
    ports: dict[str, int], server: str, requests: Any, token: str
) -> None:
    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests)
    def check(asked: tuple[str, str, bytes]) -> None:
        reply = ask(ports[server], asked, token)
        # 502: the status API's coordinator has no such trace.
        assert status(reply) < 500 or (server == "api" and status(reply) == 502), (asked, reply)
        assert b"Traceback" not in reply

    check()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/batches/ppo/x", 404),
        ("/v1/batches/ppo/7", 404),
        ("/v1/batches/sft-eval/99", 404),
        ("/v1/history?offset=" + "9" * 5000, 400),
        ("/v1/history?offset=" + "9" * 30, 400),
        ("/v1/history?offset=" + "9" * 15, 200),
    ],
)
def test_malformed_numbers_of_the_coordinator(ports: dict[str, int], path: str, code: int) -> None:
    assert status(ask(ports["coordinator"], ("GET", path, b""), TOKEN)) == code


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1", "0", "1e999", "x"])
def test_malformed_numbers_of_the_scorer(ports: dict[str, int], temperature: str) -> None:
    path = f"/v1/score?want=reference&temperature={temperature}"
    reply = ask(ports["scorer"], ("POST", path, pack(samples())), TOKEN)
    assert status(reply) == 400
    assert b"temperature" in reply


def test_a_batch_of_several_pieces_arrives_whole(tmp_path: Path) -> None:
    host, arrays = Host(tmp_path), {"tokens": np.arange(700_001, dtype=np.int32)}
    host.files.write(9, arrays)
    server = ServerThread(make_app(host, TOKEN, CollectorRegistry()))  # type: ignore[arg-type]
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/batches/ppo/9", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            assert reply.headers["Content-Type"] == CONTENT_TYPE
            assert int(reply.headers["Content-Length"]) > 2 * PIECE_BYTES
            assert reply.read() == pack(arrays)
    finally:
        server.close()


# ---------------------------------------------------------------- kept connections


def test_a_client_drops_a_kept_connection_long_before_its_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server closes it under the client's next request. 5 s is what uvicorn does unasked."""
    assert CLIENT_KEEP_SECONDS < 5 < SERVER_KEEP_SECONDS / 2
    monkeypatch.setattr(client_session, "CLIENT_KEEP_SECONDS", 0.1)

    async def scenario() -> None:
        closed = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await reader.read()
            closed.set()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server, client_session.client_session() as session, asyncio.timeout(PATIENCE):
            async with session.get(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"):
                pass
            await closed.wait()

    asyncio.run(scenario())


def test_every_aiohttp_client_of_ours_keeps_connections_so_long() -> None:
    """One that is made elsewhere has aiohttp's 15 s."""
    root = Path(__file__).parents[3]
    sources = [p for f in ("src", "trainer_image", "rollout_image", "operator") for p in (root / f).rglob("*.py")]
    assert [p.name for p in sources if "aiohttp.ClientSession(" in p.read_text()] == ["client_session.py"]
