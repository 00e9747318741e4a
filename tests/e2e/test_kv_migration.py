"""Two real vLLM servers hand each other the keys and values of samples in mid-response: nothing else may change."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.samples.migration_costs import Mechanism
from dovetail.coordinator.store.samples import NewSample, Sample
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.manifest.training_types import Generation
from dovetail.protocol.messages import HOLD, PULL, Register
from dovetail.protocol.sampling import sampling_params
from helpers.coordinated import NoWeights, drawn_with, job_of
from helpers.free_ports import free_port
from helpers.patience import PATIENCE
from helpers.vllm_servers import GREEDY, TOKEN, Server, make_run, tiny_llama, wait_for
from helpers.weight_trainer import Trainer, actor_of

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
pytestmark = pytest.mark.slow

IDS = map("sample-{}".format, itertools.count())  # several threads may ask at once, which a generator refuses
SAMPLED = Generation(max_tokens=200, temperature=0.8, top_k=100, top_p=0.95)


@dataclass
class World:
    servers: list[Server]
    trainer: Trainer
    config: Any
    version: int = 0

    def publish(self, seed: int) -> None:
        self.version += 1
        assert not any(self.trainer.publish(actor_of(self.config, seed), self.version).values())

    def hold(self, key: str) -> dict[str, Any]:
        return {HOLD: {"key": key, "weights": self.version}}

    def pull(self, key: str, source: Server, **changes: Any) -> dict[str, Any]:
        kv = source.call("/dovetail/info")[1]["kv"]
        return {PULL: {"key": key, "host": kv["host"], "ports": kv["ports"], "weights": self.version} | changes}

    def stopped(
        self,
        server: Server,
        prompt: list[int],
        after: int,
        pull: dict[str, Any] | None = None,
        spare: int = 1,
        **params: Any,
    ) -> tuple[str, list[int], list[float]]:
        """The key of a request that was aborted at some tokens, and what it had made: at least `spare` tokens less than
        it might. It is sent anew where on a busy machine the server hears of the abort too late."""
        for _ in range(10):
            key = next(IDS)
            part, logprobs = server.stream(prompt, after, key, (pull or {}) | self.hold(key), **params)
            if len(part) + spare <= params["max_tokens"]:
                return key, part, logprobs
        raise AssertionError("ten aborts in a row came too late")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    run_dir = tmp_path_factory.mktemp("run")
    config = tiny_llama(max_position_embeddings=512, initializer_range=0.2)
    make_run(run_dir, config, prompt_tokens=300, tokens=200)
    servers = [Server.start(f"rollout-{i}", run_dir, "http://127.0.0.1:9") for i in range(2)]
    trainer = Trainer(servers)
    try:
        for server in servers:
            wait_for(server.healthy, 1200, f"{server.name} to be healthy")
        made = World(servers, trainer, config)
        made.publish(3)
        yield made
    finally:
        trainer.sender.close()
        for server in servers:
            server.close()


def prompt_tokens(server: Server) -> dict[str, float]:
    """Prompt tokens so far, by where their keys and values came from."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total")]
    return {line.split('source="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found}


def gained(server: Server, before: dict[str, float]) -> dict[str, float]:
    return {source: n - before.get(source, 0.0) for source, n in prompt_tokens(server).items()}


def params_of(kind: str, seed: int, left: int, generated: int = 0) -> dict[str, Any]:
    if kind == "greedy":
        return GREEDY | {"max_tokens": left}
    return sampling_params(SAMPLED, seed, left, "counter", generated=generated) | {"ignore_eos": True}


# ---------------------------------------------------------------- continuations


@pytest.mark.parametrize(
    ("kind", "length", "after"),
    [
        ("greedy", 5, 20),
        ("sampled", 260, 90),
        pytest.param("greedy", 260, 90, marks=pytest.mark.nightly),
        pytest.param("sampled", 5, 20, marks=pytest.mark.nightly),
        pytest.param("greedy", 120, 10, marks=pytest.mark.nightly),
        pytest.param("sampled", 120, 10, marks=pytest.mark.nightly),
    ],
)
def test_a_sample_goes_on_elsewhere_without_a_prefill_and_ends_the_same(
    world: World, kind: str, length: int, after: int
) -> None:
    one, two = world.servers
    seed = 1000 * length + after + len(kind)
    prompt = [(seed + 7 * i) % 500 + 3 for i in range(length)]
    whole, whole_logprobs, _ = one.generate(prompt, **params_of(kind, seed, 200))
    key, part, part_logprobs = world.stopped(one, prompt, after, **params_of(kind, seed, 200))
    assert part == whole[: len(part)]
    assert len(part) < len(whole)
    before = prompt_tokens(two)
    params = params_of(kind, seed, 200 - len(part), len(part))
    rest, rest_logprobs, _ = two.generate(prompt + part, world.pull(key, one), **params)
    assert part + rest == whole
    assert part_logprobs + rest_logprobs == whole_logprobs
    source = gained(two, before)
    assert source["external_kv_transfer"] == length + len(part) - 1
    assert source["local_compute"] == 1


def test_half_of_a_batch_moves_and_the_other_half_does_not_notice(world: World) -> None:
    one, two = world.servers
    prompts = [[9, 8, 7, 100 + i] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(lambda i: one.generate(prompts[i], **params_of("sampled", i, 200)), range(8)))

        def sample(i: int) -> tuple[list[int], list[float]]:
            params = params_of("sampled", i, 200)
            if i >= 4:
                key = next(IDS)
                return one.stream(prompts[i], 10**6, key, world.hold(key), **params)
            # It moves at once: a server holds keys and values for half a minute only.
            key, part, logprobs = world.stopped(one, prompts[i], 30 + i, **params)
            params = params_of("sampled", i, 200 - len(part), len(part))
            rest = two.generate(prompts[i] + part, world.pull(key, one), **params)
            return part + rest[0], logprobs + rest[1]

        before = prompt_tokens(two)
        done = list(pool.map(sample, range(8)))
    assert gained(two, before)["local_compute"] == 4
    for (tokens, logprobs, _), (got, their) in zip(whole, done, strict=True):
        assert got == tokens
        assert their == logprobs


def test_a_sample_can_move_there_and_back(world: World) -> None:
    one, two = world.servers
    prompt = [40, 41, 42]
    whole, _, _ = one.generate(prompt, **params_of("sampled", 5, 200))
    tokens: list[int] = []
    pull: dict[str, Any] = {}
    for here, spare in ((one, 110), (two, 55), (one, 1)):
        params = params_of("sampled", 5, 200 - len(tokens), len(tokens))
        key, part, _ = world.stopped(here, prompt + tokens, 40, pull, spare, **params)
        tokens += part
        pull = world.pull(key, here)
        assert tokens == whole[: len(tokens)]
    params = params_of("sampled", 5, 200 - len(tokens), len(tokens))
    assert tokens + two.generate(prompt + tokens, pull, **params)[0] == whole


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("wrong", ["key", "port", "weights", "nonsense"])
def test_whatever_goes_wrong_ends_in_a_prefill(world: World, wrong: str) -> None:
    one, two = world.servers
    seed = len(wrong)
    prompt = [seed, 60, 61, 62] + [seed] * 150
    whole, whole_logprobs, _ = one.generate(prompt, **params_of("sampled", seed, 200))
    key, part, part_logprobs = world.stopped(one, prompt, 20, **params_of("sampled", seed, 200))
    pull = {
        "key": world.pull("no such key", one),
        "port": world.pull(key, one, ports=[free_port()]),
        "weights": world.pull(key, one, weights=world.version + 1),
        "nonsense": {PULL: {"key": 5, "host": None}},
    }[wrong]
    before = prompt_tokens(two)
    rest, rest_logprobs, _ = two.generate(prompt + part, pull, **params_of("sampled", seed, 200 - len(part), len(part)))
    assert part + rest == whole
    assert part_logprobs + rest_logprobs == whole_logprobs
    assert gained(two, before)["local_compute"] >= len(prompt + part) - 1
    assert one.healthy()
    assert two.healthy()


def test_keys_and_values_of_older_weights_are_never_used(world: World) -> None:
    one, two = world.servers
    prompt = list(range(200, 350))
    key, part, _ = world.stopped(one, prompt, 30, **params_of("sampled", 8, 200))
    old = world.pull(key, one)
    world.publish(4)
    rest = params_of("sampled", 8, 200 - len(part), len(part))
    expected, logprobs, _ = one.generate(prompt + part, **rest)
    for pull in (old, world.pull(key, one)):
        got, their, _ = two.generate(prompt + part, pull, **rest)
        assert got == expected
        assert their == logprobs
    # A request that says it runs on weights which the server no longer has leaves nothing behind.
    key = next(IDS)
    one.stream(prompt, 30, key, {HOLD: {"key": key, "weights": world.version - 1}}, **params_of("sampled", 9, 200))
    before = prompt_tokens(two)
    two.generate([7, *prompt], world.pull(key, one), **params_of("sampled", 9, 10))
    assert gained(two, before)["external_kv_transfer"] == 0


def test_new_weights_arrive_although_a_request_waits_for_a_silent_source(world: World) -> None:
    _, two = world.servers
    prompt = [55] * 150
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        pull = {PULL: {"key": "k", "host": "127.0.0.1", "ports": [silent.getsockname()[1]], "weights": world.version}}
        body = {"model": "actor", "token_ids": prompt, "kv_transfer_params": pull}
        body["sampling_params"] = params_of("sampled", 1, 20)
        asking = pool.submit(two.call, "/inference/v1/generate", body)
        silent.settimeout(PATIENCE)
        connection, _ = silent.accept()
        with connection:
            world.publish(5)
        status, reply = asking.result(PATIENCE)
        assert (status, reply["choices"][0]["finish_reason"]) == (200, "abort")
    expected = world.servers[0].generate(prompt, **params_of("sampled", 1, 20))
    assert two.generate(prompt, **params_of("sampled", 1, 20))[0] == expected[0]


# ---------------------------------------------------------------- the coordinator's part


def generated(
    world: World, folder: Path, number: int, drain: bool
) -> tuple[list[Sample], list[dict[str, Any]], Generator]:
    """All samples of one iteration; with `drain`, those of rollout-0 move once they have some tokens. Each `number` has
    other prompts, whose keys and values no server has."""
    events: list[dict[str, Any]] = []

    def log(event: str, **fields: Any) -> None:
        events.append({"event": event, **fields})

    async def run() -> Generator:
        fleet = Fleet(time.monotonic, log)
        fleet.publish(world.version)
        for server in world.servers:
            info = server.call("/dovetail/info")[1]
            own = {"name", "incarnation", "weight_version"}
            message = {key: info[key] for key in own} | {"abilities": {k: v for k, v in info.items() if k not in own}}
            place = {"kind": "rollout", "group": "rollout", "url": server.url, "ready": True}
            fleet.register(Register.model_validate(message | place))
        first = 3 + 40 * number
        prompts = [np.arange(first, first + 17 + i) + i for i in range(8)]
        store.samples.begin_iteration(1, [NewSample(i, 0, prompt, 70 + i) for i, prompt in enumerate(prompts)])
        # Every token is seen at once: on a fast machine all are made in half a second.
        settings = GenerationSettings(stall=60, wait=60, flush=0.01, stream_interval=1)
        job = job_of(store, log=log, spec=drawn_with(SAMPLED))
        generator = Generator(job, fleet, NoWeights(), TOKEN, settings=settings)
        # As if prefills had been seen to take long: on a model this small they don't.
        for server in world.servers:
            instance = fleet.get(server.name)
            assert instance is not None
            pretend_slow_prefills(generator, instance)
        draining: list[asyncio.Task[None]] = []

        async def leave() -> None:
            """As a pod whose node will end. Once it has left, it is of no use to any sample."""
            fleet.retire("rollout-0")
            while not generator.left("rollout-0"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            log("left")

        class Watch(DrawingFollower):
            def progress(self, done: int, total: int, tokens: int) -> None:
                if drain and tokens > 100 and not draining:
                    draining.append(asyncio.create_task(leave()))

        async with generator:
            with generator.open(1, world.version) as turn:
                await generator.generate(turn, Watch())
                # The last samples may end between two looks of `leave`.
                await asyncio.wait_for(asyncio.gather(*draining), PATIENCE)
        assert len(draining) == drain
        return generator

    store = Store(folder)
    try:
        generator = asyncio.run(run())
        return store.samples.samples(1), events, generator
    finally:
        store.close()


def pretend_slow_prefills(generator: Generator, instance: Any) -> None:
    kv = generator.kv._ability(instance)
    assert kv is not None
    generator.kv._measured(kv).measured(Mechanism.TOKENS, 10, 60.0)


def test_the_coordinator_moves_keys_and_values_of_a_drained_server(world: World, tmp_path: Path) -> None:
    for attempt in range(10):
        before = prompt_tokens(world.servers[1])
        drained, events, generator = generated(world, tmp_path / f"drained-{attempt}", attempt, drain=True)
        moved = [e for e in events if e["event"] == "sample.moved"]
        # On a busy machine a sample may not have made a token yet: then there are no keys and values to move. Or the
        # server has made them all before it hears that it shall leave: then it is tried again.
        begun = [e for e in moved if e["tokens"] > 17 + e["sample"][1]]
        if begun:
            break
    assert {(e["source"], e["instance"]) for e in moved} == {("rollout-0", "rollout-1")}
    assert events.index(moved[-1]) < events.index({"event": "left"}), "it may end when all have arrived"
    assert {e["mechanism"] for e in begun} == {"kv"}
    assert generator.kv.moves[Mechanism.KV] == len(begun)
    assert generator.kv.nbytes > 0
    assert gained(world.servers[1], before)["external_kv_transfer"] > 0
    undisturbed, _, _ = generated(world, tmp_path / "undisturbed", attempt, drain=False)
    for a, b in zip(undisturbed, drained, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.finish_reason == b.finish_reason
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_a_source_that_was_killed_costs_a_prefill(world: World) -> None:
    one, two = world.servers
    prompt = [77] * 140
    whole, _, _ = two.generate(prompt, **params_of("sampled", 3, 200))
    key, part, _ = world.stopped(one, prompt, 20, **params_of("sampled", 3, 200))
    pull = world.pull(key, one)
    one.process.send_signal(signal.SIGKILL)
    one.process.wait(PATIENCE)
    rest, _, _ = two.generate(prompt + part, pull, **params_of("sampled", 3, 200 - len(part), len(part)))
    assert part + rest == whole
    assert two.healthy()
