"""Held blocks and their way over TCP: real sockets, no vLLM."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.rollout.kv import kv_config as config
from dovetail.rollout.kv.held import Held, HeldBlocks
from dovetail.rollout.kv.kv_wire import HeldServer, PullError, pull

TOKEN, LAYOUT = "job-token", "float32 x 1"
BLOCK_BYTES = (48, 96)


def entry(weights: int = 7, tokens: int = 20, blocks: int = 5) -> Held:
    layers = tuple(torch.randint(0, 256, (blocks, n), dtype=torch.uint8) for n in BLOCK_BYTES)
    return Held(weights, tokens, layers)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------- what is kept, and how long


def test_an_entry_is_kept_until_its_time_is_over() -> None:
    clock = Clock()
    held = HeldBlocks(10_000, 30.0, lambda: 7, clock)
    assert held.put("a", entry())
    clock.now += 29.9
    assert held.get("a") is not None
    clock.now += 0.2
    assert held.get("a") is None
    assert held.nbytes == 0


def test_an_entry_that_comes_again_is_kept_anew() -> None:
    clock = Clock()
    held = HeldBlocks(10_000, 30.0, lambda: 7, clock)
    held.refuse("a")
    clock.now += 10
    assert held.put("b", entry())
    clock.now += 15
    assert held.put("a", entry())
    clock.now += 10
    assert held.get("a") is not None
    clock.now += 10
    assert held.get("b") is None
    assert held.get("a") is not None
    clock.now += 11
    assert held.get("a") is None


def test_no_entry_survives_its_weight_version() -> None:
    version: list[int | None] = [7]
    held = HeldBlocks(10_000, 30.0, lambda: version[0])
    held.put("a", entry(weights=7))
    version[0] = None
    assert held.get("a") is None
    version[0] = 7
    assert held.get("a") is None, "forgotten when the update began"
    assert not held.put("b", entry(weights=6)), "computed by an older version"


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.floats(0, 20)), max_size=40))
def test_memory_is_bounded_whatever_comes(steps: list[tuple[int, int, float]]) -> None:
    clock = Clock()
    capacity = 9 * sum(BLOCK_BYTES)
    held = HeldBlocks(capacity, 30.0, lambda: 7, clock)
    for key, blocks, seconds in steps:
        before = held.nbytes
        kept = held.put(str(key), entry(blocks=blocks))
        assert held.nbytes <= capacity
        if not kept:
            assert before + blocks * sum(BLOCK_BYTES) > capacity
        clock.now += seconds


def test_a_waiting_reader_gets_what_arrives_meanwhile() -> None:
    held = HeldBlocks(10_000, 30.0, lambda: 7)
    timer = threading.Timer(0.05, lambda: held.put("late", entry()))
    timer.start()
    assert held.get("late", wait=30.0) is not None
    timer.join()


def test_nobody_waits_for_an_entry_that_was_refused() -> None:
    clock = Clock()
    held = HeldBlocks(10_000, 30.0, lambda: 7, clock)
    timer = threading.Timer(0.05, lambda: held.refuse("late"))
    timer.start()
    began = time.monotonic()
    assert held.get("late", wait=600.0) is None
    assert held.get("late", wait=600.0) is None
    assert time.monotonic() - began < 300
    timer.join()
    assert held.nbytes == 0
    clock.now += 30.1
    held.purge()
    assert held.put("late", entry()), "another request with this key"
    assert held.get("late") is not None


# ---------------------------------------------------------------- over the wire


@pytest.fixture
def held() -> HeldBlocks:
    return HeldBlocks(100_000, 30.0, lambda: 7)


@pytest.fixture
def server(held: HeldBlocks) -> Iterator[HeldServer]:
    made = HeldServer(("127.0.0.1", 0), held, TOKEN, LAYOUT, seconds=30.0, wait=0.0)
    yield made
    made.close()


def fetch(
    server: HeldServer, key: str = "a", blocks: tuple[int, int] = (0, 5), **changes: object
) -> list[torch.Tensor]:
    arguments: dict[str, object] = {
        "address": ("127.0.0.1", server.port),
        "token": TOKEN,
        "key": key,
        "blocks": blocks,
        "tokens": 20,
        "weights": 7,
        "layout": LAYOUT,
        "block_bytes": BLOCK_BYTES,
        "seconds": 30.0,
    }
    return pull(**(arguments | changes))  # type: ignore[arg-type]


def test_blocks_arrive_as_they_were_and_are_then_let_go(held: HeldBlocks, server: HeldServer) -> None:
    sent = entry()
    key = "dovetail-1/2?x&y=é"
    held.put(key, sent)
    got = fetch(server, key, (1, 4))
    assert all(torch.equal(g, s[1:4]) for g, s in zip(got, sent.layers, strict=True))
    deadline = time.monotonic() + 60
    while held.nbytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held.nbytes == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "other"}, "404"),
        ({"token": "wrong"}, "401"),
        ({"token": ""}, "401"),
        ({"tokens": 21}, "409"),
        ({"blocks": (0, 6)}, "409"),
        ({"weights": 8}, "weights 8"),
        ({"layout": "bfloat16 x 1"}, "bfloat16"),
        ({"block_bytes": (48, 97)}, "bytes"),
    ],
)
def test_nothing_but_what_was_asked_for_is_taken(
    held: HeldBlocks, server: HeldServer, changes: dict[str, object], message: str
) -> None:
    held.put("a", entry())
    with pytest.raises(PullError, match=message):
        fetch(server, **changes)


def test_a_malformed_request_gets_400_and_the_server_goes_on(held: HeldBlocks, server: HeldServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/kv/a?first=x", headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 400
    connection.close()
    held.put("a", entry())
    assert len(fetch(server)) == 2


@pytest.mark.slow
def test_a_dead_source_is_noticed_at_once(server: HeldServer) -> None:
    server.close()
    with pytest.raises(PullError, match="ConnectionRefused"):
        fetch(server)


@pytest.mark.slow
@pytest.mark.parametrize("stall", ["never answers", "stops in the middle", "trickles"])
def test_a_stalled_source_costs_no_more_than_the_deadline(stall: str) -> None:
    size = 5 * sum(BLOCK_BYTES)
    stop = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            if stall != "never answers":
                described = json.dumps({"weights": 7, "layout": LAYOUT})
                head = f"HTTP/1.1 200 OK\r\nX-Dovetail-KV: {described}\r\nContent-Length: {size}\r\n\r\n"
                connection.sendall(head.encode() + b"x" * 10)
            while not stop.wait(0.1):
                if stall == "trickles":
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        began = time.monotonic()
        with pytest.raises(PullError):
            pull(listener.getsockname(), TOKEN, "a", (0, 5), 20, 7, LAYOUT, BLOCK_BYTES, 1.0)
        assert time.monotonic() - began < 20, "some 70 s at the trickle's pace"
        stop.set()
        thread.join()


@pytest.mark.slow
def test_an_interrupted_reader_may_come_again() -> None:
    big = Held(7, 20, tuple(torch.zeros((5, 4_000_000), dtype=torch.uint8) for _ in range(2)))
    held = HeldBlocks(10**9, 30.0, lambda: 7)
    other = HeldServer(("127.0.0.1", 0), held, TOKEN, LAYOUT, seconds=30.0, wait=0.0)
    try:
        held.put("a", big)
        with socket.create_connection(("127.0.0.1", other.port), timeout=30) as client:
            request = f"GET /kv/a?first=0&last=5&tokens=20 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            client.sendall(request.encode())
            client.recv(1000)
        assert fetch(other, block_bytes=(4_000_000, 4_000_000))[1].sum() == 0
    finally:
        other.close()


# ---------------------------------------------------------------- settings


@pytest.mark.slow
def test_a_reserved_port_is_ours_and_nobody_elses(held: HeldBlocks) -> None:
    (reserved,) = config.reserve_ports("127.0.0.1", 1)
    port = reserved.getsockname()[1]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    server = HeldServer(("127.0.0.1", port), held, TOKEN, LAYOUT, seconds=30.0, wait=0.0)
    try:
        held.put("a", entry())
        assert len(fetch(server)) == 2
    finally:
        server.close()
        reserved.close()


def test_cpus_use_tcp_and_gpus_nixl_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: object() if name == "nixl" else None)
    assert config.choose_transport(on_cpu=True) == "tcp"
    setup = config.prepare("127.0.0.1", False, 4, "bfloat16 x 4", 100)
    chosen = json.loads(setup.arguments[1])
    assert (chosen["kv_connector"], chosen["kv_load_failure_policy"]) == ("NixlConnector", "recompute")
    assert setup.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert setup.ability.transport == "nixl"
    assert setup.ability.ports == []

    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    setup = config.prepare("127.0.0.1", False, 4, "bfloat16 x 4", 100)
    chosen = json.loads(setup.arguments[1])
    assert chosen["kv_connector_module_path"] == "dovetail.rollout.kv.connector"
    assert chosen["kv_connector_extra_config"]["ports"] == setup.ability.ports
    assert len(set(setup.ability.ports)) == 4
    assert setup.environment == {}
    for reserved in setup.reserved:
        reserved.close()
