"""Real vLLM servers of several processes, two pipeline stages or two tensor parallel ranks, beside one of one process:
nothing that a user sees may differ."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dovetail.manifest.training_types import Generation
from dovetail.protocol.messages import HOLD, PULL
from dovetail.protocol.plan import Plan, Rollout
from dovetail.protocol.sampling import sampling_params
from helpers.patience import PATIENCE
from helpers.relayed_weights import DEADLINE_SECONDS, relay
from helpers.vllm_servers import GREEDY, Server, make_run, tiny_llama, wait_for
from helpers.weight_trainer import EPOCHS, Trainer, actor_of

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
pytestmark = pytest.mark.slow

COORDINATOR = "http://127.0.0.1:9"
# A server may be many tokens ahead of whoever stops it.
# Long enough for an abort to come in time, be the machine as busy as it likes.
SHORT, LONG = 60, 400
SAMPLED = Generation(max_tokens=LONG, temperature=0.8, top_k=100, top_p=0.95)
CONFIG = tiny_llama(max_position_embeddings=512)
PROMPTS = [[5, 9, 33, 7], [3, 1, 4], list(range(20, 70)), *([40 + i, 9, 8] for i in range(5))]


@dataclass
class World:
    alone: Server
    staged: Server
    halves: Server
    trainer: Trainer

    @property
    def servers(self) -> list[Server]:
        return [self.alone, self.staged, self.halves]

    def publish(self, seed: int, version: int, *servers: Server) -> Any:
        """Send a model to all servers, or to these alone. Returns the model."""
        model = actor_of(CONFIG, seed)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, of which each layer's are to be its own
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        trainer = Trainer(servers) if servers else self.trainer
        assert not any(trainer.publish(model, version).values())
        # Servers leave the communicators that they shared with others.
        self.trainer.epoch, self.trainer.new = next(EPOCHS), True
        if servers:
            trainer.sender.close()
        return model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """`staged` is what a plan asks for: its group has GPUs, which are CPUs here."""
    alone, staged = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("staged")
    make_run(alone, CONFIG, prompt_tokens=64, tokens=LONG)
    make_run(staged, CONFIG, 64, LONG, gpu={"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2})
    rollouts = [Rollout(name="rollout-0", group="rollout", pp=2)]
    plan = Plan(world_size=1, parallelism={}, batching=[], tasks=[], trainers=[], rollouts=rollouts)
    (staged / "plan.json").write_text(plan.model_dump_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        servers = [
            Server.start("alone", alone, COORDINATOR),
            Server.start("staged", staged, COORDINATOR),
            Server.start("halves", alone, COORDINATOR, "--tensor-parallel-size", "2"),
        ]
    trainer = Trainer(servers)
    try:
        for server in servers:
            wait_for(server.healthy, 1200, f"{server.name} to be healthy")
        made = World(*servers, trainer)
        made.publish(21, 1)
        yield made
    finally:
        trainer.sender.close()
        for server in servers:
            server.close()


def sampled(seed: int, generated: int = 0, tokens: int = LONG) -> dict[str, Any]:
    return sampling_params(SAMPLED, seed, tokens - generated, "counter", generated=generated) | {"ignore_eos": True}


def batch(server: Server) -> list[tuple[list[int], list[float], str]]:
    """Responses to all prompts at once, greedy and sampled: more than one micro-batch of every stage."""
    asked = [(prompt, params) for i, prompt in enumerate(PROMPTS) for params in (GREEDY, sampled(i, tokens=SHORT))]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: server.generate(one[0], **one[1]), asked))


def digests(server: Server) -> dict[str, dict[str, str]]:
    """A digest of every tensor, by name, of every worker."""
    found: dict[str, dict[str, str]] = {}
    for name, digest in server.call("/weight_checker", {"action": "checksum"})[1]["checksums"].items():
        worker, tensor = name.rsplit(":", 1)
        found.setdefault(worker, {})[tensor] = digest
    return found


def test_servers_tell_of_their_workers_and_of_keys_and_values_only_where_they_can_leave(world: World) -> None:
    alone, staged, halves = (s.call("/dovetail/info")[1] for s in (world.alone, world.staged, world.halves))
    assert [info["world"] for info in (alone, staged, halves)] == [1, 2, 2]
    assert (staged["kv"], staged["kv_connector"]) == (None, None)
    assert len(alone["kv"]["ports"]) == 1
    assert len(set(halves["kv"]["ports"])) == 2
    assert halves["kv"]["layout"] != alone["kv"]["layout"]


def test_all_say_what_one_process_says_with_every_version_of_the_weights(world: World) -> None:
    said = []
    for version, seed in ((2, 22), (3, 23)):
        world.publish(seed, version)
        expected = batch(world.alone)
        for server in (world.staged, world.halves):
            assert server.weight_version() == version
            for (got, theirs, reason), (tokens, logprobs, why) in zip(batch(server), expected, strict=True):
                assert got == tokens
                assert theirs == pytest.approx(logprobs, abs=1e-5)
                assert reason == why
        said.append([tokens for tokens, _, _ in expected])
    assert all(one != other for one, other in zip(*said, strict=True))


def test_every_stage_holds_its_own_tensors_and_no_others(world: World) -> None:
    (whole,) = digests(world.alone).values()
    stages = [found for _, found in sorted(digests(world.staged).items())]
    layers = [{int(n) for name in stage for n in re.findall(r"layers\.(\d+)\.", name)} for stage in stages]
    assert layers == [{0, 1}, {2}]
    embedding = {name for name in whole if "embed_tokens" in name}
    first = embedding | {name for name in whole if re.search(r"layers\.[01]\.", name)}
    # The last stage has the embedding too: it is its head.
    assert embedding
    assert [set(stage) for stage in stages] == [first, set(whole) - first | embedding]
    # The same bytes too, of what oneDNN has not packed away: embeddings and norms.
    assert stages[0] | stages[1] == whole
    assert len(set(whole.values())) >= 1 + 2 * 3 + 1


@pytest.mark.parametrize("to_stages", [True, False])
def test_a_sample_goes_on_elsewhere_as_if_it_had_not_moved(world: World, to_stages: bool) -> None:
    source, target = (world.alone, world.staged) if to_stages else (world.staged, world.alone)
    prompt = [6, 7, 8]
    tokens, _, _ = world.alone.generate(prompt, **sampled(5))
    _, part = stopped_midway(source, prompt, None, 5)
    assert part
    assert part + target.generate(prompt + part, **sampled(5, len(part)))[0] == tokens


def stopped_midway(server: Server, prompt: list[int], version: int | None, seed: int) -> tuple[str, list[int]]:
    """A request that was aborted before it was done, and its tokens. With a `version`, its keys and values are kept.

    Ranks that wait for each other by spinning may keep two cores so busy that the engine hears of an abort only
    afterwards: then it is tried again."""
    for attempt in range(10):
        name = f"moved{attempt}"
        hold = {} if version is None else {HOLD: {"key": name, "weights": version}}
        part, _ = server.stream(prompt, 10, name, hold, **sampled(seed))
        if len(part) < LONG:
            return name, part
    raise AssertionError(f"ten aborts in a row came after {LONG} tokens")


def test_keys_and_values_of_both_ranks_are_handed_over(world: World) -> None:
    prompt, version = [9, 7, 5], world.halves.weight_version()
    tokens, _, _ = world.halves.generate(prompt, **sampled(6))
    name, part = stopped_midway(world.halves, prompt, version, 6)
    assert part
    kv = world.halves.call("/dovetail/info")[1]["kv"]
    pull = {PULL: {"key": name, "host": kv["host"], "ports": kv["ports"], "weights": version}}
    assert part + world.halves.generate(prompt + part, pull, **sampled(6, len(part)))[0] == tokens
    # Each rank took its own heads.
    told = re.compile(name + r": (\d+) tokens, (\d+) bytes taken over")
    wait_for(lambda: len(told.findall(world.halves.log.read_text())) == 2, PATIENCE, "both ranks to say so")
    taken = told.findall(world.halves.log.read_text())
    assert set(taken) == {(str(len(prompt + part) - 1), taken[0][1])}


def test_a_late_server_gets_the_trainers_bits_from_one_of_any_layout_which_goes_on_generating(world: World) -> None:
    world.publish(31, 11)
    held, said = {s.name: digests(s) for s in world.servers}, batch(world.alone)
    world.publish(32, 12)
    model = world.publish(31, 13, world.alone)
    pairs = [(world.alone, world.staged), (world.staged, world.halves)]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(world.alone.generate, [6, 7, 8], **sampled(5))
        for holder, late in pairs:
            assert late.weight_version() == 12
            ((event, fields),) = relay([holder, late], late, model, 13)
            assert (event, fields["sender"], fields["instance"]) == ("weights.relayed", holder.name, late.name)
            assert late.weight_version() == 13
        assert beside.result(timeout=PATIENCE)[0] == world.alone.generate([6, 7, 8], **sampled(5))[0]
    for server in world.servers:
        assert digests(server) == held[server.name]
        assert [tokens for tokens, _, _ in batch(server)] == [tokens for tokens, _, _ in said]


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_server_that_freezes_or_dies_while_it_sends_is_named_and_another_sends(world: World, killed: bool) -> None:
    """The frozen one thaws. The killed one is `alone`, too, which no later test needs."""
    version = 16 + killed
    model = world.publish(34 + killed, version, world.alone, world.staged)
    family = [psutil.Process(world.alone.process.pid)]
    family += family[0].children(recursive=True)
    asked: list[str] = []

    def fault(receiver: str) -> None:
        asked.append(receiver)
        if len(asked) > 1:
            return
        if killed:
            world.alone.close()
        else:
            for process in family:
                process.suspend()

    try:
        lost, sent = relay(world.servers, world.halves, model, version, fault)
    finally:
        if not killed:
            for process in family:
                process.resume()
    assert (lost[0], lost[1]["sender"], lost[1]["instance"]) == ("weights.relay_failed", "alone", "halves")
    assert f"version {version} did not come from alone: " in lost[1]["reason"]
    assert lost[1]["seconds"] < DEADLINE_SECONDS
    assert (sent[0], sent[1]["sender"]) == ("weights.relayed", "staged")
    assert world.halves.weight_version() == version
    prompt = [6, 7, 8]
    assert world.halves.generate(prompt, **sampled(5))[0] == world.staged.generate(prompt, **sampled(5))[0]
    if not killed:
        assert world.alone.generate(prompt, **sampled(5))[0] == world.staged.generate(prompt, **sampled(5))[0]


def processes(server: Server) -> list[psutil.Process]:
    """The engine core and its workers, two at least."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    assert len(found) >= 3
    return found


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_terminated_server_ends_its_ranks_at_once_and_a_killed_ones_stages_end_too(world: World) -> None:
    ranks, stages = processes(world.halves), processes(world.staged)
    # Nobody takes the shared memory of killed processes away.
    shared = {m.path for process in ranks + stages for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    try:
        world.halves.process.send_signal(signal.SIGTERM)
        assert world.halves.process.wait(PATIENCE) == 0, world.halves.failure()
        wait_for(lambda: all(map(gone, ranks)), PATIENCE, "the engine core and its ranks to end")
        world.staged.process.kill()
        world.staged.process.wait(PATIENCE)
        wait_for(lambda: all(map(gone, stages)), PATIENCE, "the engine core and its stages to end")
    finally:
        for path in shared:
            Path(path).unlink(missing_ok=True)
