"""Two real vLLM servers, as a job starts them: weights over the wire, generation, migration, faults."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dovetail.coordinator.workers import offers
from dovetail.coordinator.workers.offers import ReceiverError
from dovetail.manifest.training_types import Generation
from dovetail.protocol.messages import Offer, Publish
from dovetail.protocol.sampling import sampling_params
from helpers import weight_trainer
from helpers.patience import PATIENCE
from helpers.vllm_servers import GREEDY, TOKEN, Server, make_run, tiny_llama, wait_for
from helpers.weight_trainer import EPOCHS, Alone, Trainer, actor_of, probe_of, publish_command, push, weights_of

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
pytestmark = pytest.mark.slow


class Coordinator:
    """Takes registrations."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, Any]]] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Authorization"] == f"Bearer {TOKEN}"
                outer.seen.setdefault(body["name"], []).append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@dataclass
class World:
    run_dir: Path
    coordinator: Coordinator
    servers: list[Server]
    config: Any
    slow: list[socket.socket]


def half_request(server: Server, text: bytes) -> socket.socket:
    """A connection that has sent `text`, and sends no more."""
    made = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)
    made.sendall(text)
    return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    run_dir = tmp_path_factory.mktemp("run")
    config = tiny_llama()
    make_run(run_dir, config, prompt_tokens=128, tokens=128)
    coordinator = Coordinator()
    servers = [Server.start(f"rollout-{i}", run_dir, coordinator.url) for i in range(2)]
    try:
        for server in servers:
            wait_for(server.healthy, 1200, f"{server.name} to be healthy")
        slow = [half_request(server, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ") for server in servers]
        yield World(run_dir, coordinator, servers, config, slow)
    finally:
        for server in servers:
            server.close()
        coordinator.server.shutdown()


@pytest.fixture(scope="module")
def trainer(world: World) -> Iterator[Trainer]:
    made = Trainer(world.servers)
    yield made
    made.sender.close()


def hf_greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens = list(prompt)
    logprobs = []
    with torch.no_grad():
        for _ in range(count):
            row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


# ---------------------------------------------------------------- what users would notice


def test_servers_register_and_refuse_to_generate_before_weights_came(world: World) -> None:
    for server in world.servers:
        assert server.weight_version() is None
        status, text = server.call("/inference/v1/generate", {"token_ids": [1], "sampling_params": GREEDY})
        assert status == 503
        assert "weights" in text
        wait_for(
            lambda server=server: any(m["ready"] for m in world.coordinator.seen.get(server.name, [])), 120, "ready"
        )
        last = world.coordinator.seen[server.name][-1]
        assert (last["kind"], last["group"], last["url"]) == ("rollout", "rollout", server.url)
        assert last["weight_version"] is None
        assert last["abilities"]["sampler"] == "counter"
        assert last["abilities"]["max_model_len"] == 256


def test_every_route_but_probes_asks_for_the_token(world: World) -> None:
    server = world.servers[0]
    for path in ("/dovetail/info", "/v1/models", "/is_paused", "/server_info", "/pause", "/openapi.json"):
        for token in ("", "wrong", TOKEN[:-1]):
            assert server.call(path, token=token)[0] == 401, path
    for path in ("/health", "/metrics"):
        with urllib.request.urlopen(server.url + path, timeout=PATIENCE) as reply:
            assert reply.status == 200


def test_greedy_output_is_the_published_models(world: World, trainer: Trainer) -> None:
    for version, seed in ((1, 10), (2, 11)):
        model = actor_of(world.config, seed)
        assert trainer.publish(model, version) == {"rollout-0": None, "rollout-1": None}
        prompt = [5, 9, 33, 7]
        tokens, logprobs = hf_greedy(model, prompt, 40)
        for server in world.servers:
            got, their, _ = server.generate(prompt, **GREEDY)
            assert got == tokens
            assert their == pytest.approx(logprobs, abs=1e-5)
            assert server.weight_version() == version
    wait_for(
        lambda: world.coordinator.seen["rollout-1"][-1]["weight_version"] == 2, PATIENCE, "the new version's report"
    )


@pytest.mark.parametrize(
    "generation",
    [
        Generation(max_tokens=100),
        pytest.param(Generation(max_tokens=100, temperature=0.7, top_k=20), marks=pytest.mark.nightly),
        Generation(max_tokens=100, temperature=1.3, top_p=0.9, min_tokens=60),
        Generation(max_tokens=100, top_k=50, top_p=0.8),
    ],
    ids=["plain", "top-k", "top-p", "both"],
)
def test_a_sample_goes_on_elsewhere_as_if_it_had_never_moved(
    world: World, trainer: Trainer, generation: Generation
) -> None:
    one, two = world.servers
    if one.weight_version() is None:
        assert not any(trainer.publish(actor_of(world.config, 11), 2).values())
    for seed in range(3):
        prompt = [3, 1, 4, 1, 5 + seed]
        whole, whole_logprobs, reason = one.generate(prompt, **sampling_params(generation, seed, 100, "counter"))
        assert two.generate(prompt, **sampling_params(generation, seed, 100, "counter"))[0] == whole
        part, part_logprobs = one.stream(prompt, 9 + 5 * seed, **sampling_params(generation, seed, 100, "counter"))
        assert part == whole[: len(part)]
        if len(part) == len(whole):
            continue
        params = sampling_params(generation, seed, 100 - len(part), "counter", generated=len(part))
        rest, rest_logprobs, rest_reason = two.generate(prompt + part, **params)
        assert part + rest == whole
        assert rest_reason == reason
        assert part_logprobs + rest_logprobs == whole_logprobs
        assert len(whole) >= generation.min_tokens
    other = one.generate(prompt, **sampling_params(generation, 99, 100, "counter"))[0]
    assert other != whole


def test_bad_sampling_parameters_are_a_400_and_hurt_nobody(world: World, trainer: Trainer) -> None:
    server = world.servers[0]
    bad = {**GREEDY, "extra_args": {"dt_seed": 1, "dt_top_p": 7}}
    status, text = server.call("/inference/v1/generate", {"model": "actor", "token_ids": [1], "sampling_params": bad})
    assert status == 400
    assert "dt_top_p" in text
    assert server.healthy()


def test_a_wrong_checksum_leaves_servers_stale_until_a_whole_version_arrives(
    world: World, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dovetail.trainer.weight_sender as sending

    good = sending.pack_into
    count = itertools.count()

    def corrupt(buffer: torch.Tensor, *args: Any) -> None:
        good(buffer, *args)
        if next(count) == 2:
            buffer[1000] ^= 1

    model = actor_of(world.config, 12)
    monkeypatch.setattr(sending, "pack_into", corrupt)
    errors = trainer.publish(model, 3)
    assert all("checksum" in str(e) for e in errors.values()), errors
    for server in world.servers:
        assert server.weight_version() is None
        assert server.call("/inference/v1/generate", {"token_ids": [1], "sampling_params": GREEDY})[0] == 503
        assert server.healthy()
    monkeypatch.undo()
    assert trainer.publish(model, 4) == {"rollout-0": None, "rollout-1": None}
    for server in world.servers:
        assert server.generate([8, 8], **GREEDY)[0] == hf_greedy(model, [8, 8], 40)[0]


# Of a transfer whose sender dies: long enough to tell that nobody waited for it.
DEADLINE_SECONDS = 900.0


def send_and_stall(command: Publish, state: dict[str, torch.Tensor], pipe: Any) -> None:
    from dovetail.trainer.weight_sender import WeightSender

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for k, item in enumerate(state.items()):
            if calls > 1 and k == 12:
                pipe.send("stalled")
                time.sleep(3600)
            yield item

    calls = 0

    def again() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal calls
        calls += 1
        return source()

    sender = WeightSender(
        Alone(), lambda offer: pipe.send(offer.model_dump_json()), host="127.0.0.1", bucket_bytes=150_000
    )
    sender.publish(command, {"actor": again})


def test_a_sender_killed_in_mid_transfer_leaves_servers_stale_and_another_recovers_them(
    world: World, trainer: Trainer
) -> None:
    model = actor_of(world.config, 13)
    command = publish_command(world.servers, 5, next(EPOCHS), DEADLINE_SECONDS)
    # A forked child would hang in its first parallel region: this process has used OpenMP's threads.
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=send_and_stall, args=(command, dict(weights_of(model)), there))
    process.start()
    try:
        assert here.poll(600), "no offer"
        offer = Offer.model_validate_json(here.recv())
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(push, world.servers, command, offer, True)
            assert here.poll(600), "the sender did not come to its second iteration"
            assert here.recv() == "stalled"
            process.kill()
            start_time = time.monotonic()
            errors = pushing.result()
    finally:
        process.kill()
        process.join()
    assert all(errors.values()), errors
    assert time.monotonic() - start_time < DEADLINE_SECONDS, "a dead sender must be noticed before the deadline"
    for server in world.servers:
        assert server.weight_version() is None
    trainer.epoch, trainer.new = next(EPOCHS), True
    assert trainer.publish(model, 6) == {"rollout-0": None, "rollout-1": None}
    assert world.servers[1].generate([4], **GREEDY)[0] == hf_greedy(model, [4], 40)[0]


def test_a_receiver_that_never_comes_is_named_and_the_sender_goes_on(world: World, trainer: Trainer) -> None:
    from dovetail.models.links.deadline import TransferError

    model = actor_of(world.config, 14)
    trainer.epoch = next(EPOCHS)
    command = publish_command(world.servers, 7, trainer.epoch, 3.0)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.sender.publish, command, {"actor": lambda: weights_of(model)})
        trainer.offers.get(timeout=PATIENCE)
        with pytest.raises(TransferError, match="rollout-0, rollout-1"):
            sending.result(timeout=PATIENCE)
    # Nothing reached the servers: they still answer with what they had.
    assert world.servers[0].weight_version() == 6
    trainer.epoch, trainer.new = next(EPOCHS), True
    assert trainer.publish(model, 8) == {"rollout-0": None, "rollout-1": None}


def test_a_server_that_serves_other_weights_than_it_was_sent_answers_nobody(
    world: World, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = actor_of(world.config, 15), actor_of(world.config, 16)
    monkeypatch.setattr(weight_trainer, "probe_of", lambda _, version: probe_of(other, version))
    for server, error in zip(world.servers, trainer.publish(model, 9).values(), strict=True):
        assert "does not serve the weights of version 9" in (error or "")
        assert server.weight_version() is None
        assert server.call("/inference/v1/generate", {"token_ids": [1], "sampling_params": GREEDY})[0] == 503
        assert server.call("/dovetail/serve", {"weight_version": 8})[0] == 409
    monkeypatch.undo()
    assert trainer.publish(model, 10) == {"rollout-0": None, "rollout-1": None}
    assert world.servers[0].generate([8, 8], **GREEDY)[0] == hf_greedy(model, [8, 8], 40)[0]


@pytest.mark.parametrize("lost", ["update_weights", "reset_prefix_cache"])
def test_an_update_that_nobody_finishes_hinders_no_later_one(
    world: World, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """As of a coordinator that dies before this call."""
    if lost == "update_weights":
        for server in world.servers:
            assert server.call("/pause?mode=abort", method="POST")[0] == 200
            assert server.call("/start_weight_update", method="POST")[0] == 200
    else:
        post = offers.post

        async def dying(session: Any, url: str, *arguments: Any) -> Any:
            if f"/{lost}" in url:
                raise ReceiverError("the coordinator died")
            return await post(session, url, *arguments)

        monkeypatch.setattr(offers, "post", dying)
        errors = trainer.publish(actor_of(world.config, 18), 10)
        assert list(errors.values()) == ["the coordinator died"] * 2
        monkeypatch.undo()
    assert [server.weight_version() for server in world.servers] == [None, None]
    model = actor_of(world.config, 19)
    assert trainer.publish(model, 10) == {"rollout-0": None, "rollout-1": None}
    for server in world.servers:
        assert server.generate([8, 8], **GREEDY)[0] == hf_greedy(model, [8, 8], 40)[0]


def test_half_a_header_is_closed(world: World, trainer: Trainer) -> None:
    """The fixture sent it. In the tests until here the deadline has passed, while the servers answered others."""
    for connection in world.slow:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()


def test_a_server_holds_no_more_after_400_samples_and_40_versions(world: World, trainer: Trainer) -> None:
    def held() -> int:
        """Bytes that belong to the first server and its engine core alone."""
        server = psutil.Process(world.servers[0].process.pid)
        return sum(p.memory_full_info().uss for p in [server, *server.children(recursive=True)])

    model = actor_of(world.config, 17)
    sizes = []
    with ThreadPoolExecutor(10) as pool:
        for iteration in range(40):
            assert not any(trainer.publish(model, 11 + iteration).values())
            prompts = [[iteration + 3, k + 3] for k in range(10)]
            done = pool.map(lambda prompt: world.servers[0].generate(prompt, **GREEDY | {"max_tokens": 4}), prompts)
            assert all(len(tokens) == 4 for tokens, _, _ in done)
            sizes.append(held())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # The allocators' pools grow for the first versions. A version that stayed would add its size each time.
    assert sizes[-1] - sizes[19] < 10 * weights, "twenty versions later it holds less than ten more"


def children(pid: int) -> list[int]:
    out = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in out.split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_server_leaves_no_engine_behind_and_a_terminated_one_goes_at_once(
    world: World, trainer: Trainer
) -> None:
    killed, other = world.servers
    engines = children(killed.process.pid)
    assert engines
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait(PATIENCE)
    wait_for(lambda: not any(running(pid) for pid in engines), PATIENCE, "the engine core to end with its server")

    engines = children(other.process.pid)
    # With a client still reading a response.
    params = sampling_params(Generation(max_tokens=128), 1, 128, "counter") | {"ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(other.generate, [1, 2], **params)
        os.kill(other.process.pid, signal.SIGTERM)
        assert other.process.wait(PATIENCE) == 0
        reading.exception(timeout=PATIENCE)
    wait_for(lambda: not any(running(pid) for pid in engines), PATIENCE, "the engine core to end")
