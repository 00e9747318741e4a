"""What a change may cost at most: `make budgets`. Figures are counts, or CPU time over that of an anchor in the same
run, so that they hold on any processor and under load. A change that needs more raises the budget here, and its commit
says why. Budgets of what is asked of a GPU are beside their tests, in tests/nullgpu, with the mark `budget` too."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from dovetail.coordinator.samples import requests
from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.store.samples import NewSample
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.manifest.training_types import Generation
from dovetail.protocol.messages import Register
from dovetail.protocol.sample_stream import Row, pack_rows, unpack_asked
from helpers.coordinated import NoWeights, drawn_with, job_of
from helpers.jobs import MANIFEST, events

pytestmark = [pytest.mark.slow, pytest.mark.budget]

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
SECONDS = 1200
TRAINER = {"name": "trainers", "roles": ["trainer"], "replicas": 1}
ROLLOUT = {"name": "rollouts", "roles": ["rollout"], "replicas": 1}

# What a healthy run has none of.
REPEATED = {
    *("sample.retried", "samples.lost", "request.failed", "reward.failed", "rank.failed", "rank.stuck"),
    *("trainers.recover", "trainers.lost", "weights.failed", "weights.relay_failed", "coordinator.unreachable"),
}
# A loss that tells what the trainer's process has used whenever it is called.
COUNTED = """
import json, resource
import torch

def loss(inputs):
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("{told}", "a") as file:
        file.write(json.dumps([used.ru_minflt, used.ru_maxrss]) + "\\n")
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(0.8, 1.2))
"""
ITERATIONS, CALLS = 8, 4  # of the loss in an iteration: 16 samples, four in each micro-batch

# CPU time like that of a coordinator: JSON, small objects, and a dictionary. Prints seconds, the least of seven.
PLAIN_PYTHON = """
import json, time
def work():
    began, seen = time.process_time(), {}
    for number in range(300):
        line = json.dumps({"id": number, "tokens": list(range(60)), "numbers": [number / 7] * 60})
        for place, token in enumerate(json.loads(line)["tokens"]):
            seen[number, token] = [place]
    return time.process_time() - began
print(min(work() for _ in range(7)))
"""


def within(what: str, figure: float, budget: float) -> None:
    print(f"{what}: {figure:.4g} (budget {budget:g})")
    if figure > budget:
        pytest.fail(
            f"{what}: {figure:.4g}, over the budget of {budget:g}; make the change cheaper, or raise the budget in "
            "tests/budgets and say why in the commit",
            pytrace=False,
        )


def cpu_seconds(*command: str, cwd: Path) -> float:
    """User and system time of a command and the processes that it waited for. Fails the test if the command fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=cwd, env=ONE_THREAD, capture_output=True, text=True, timeout=SECONDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(folder: Path, **spec: Any) -> tuple[Path, float]:
    """`dovetail run` of the tiny job in a folder: the run's folder and the CPU seconds of all its processes."""
    document = yaml.safe_load(MANIFEST)
    document["spec"] |= {
        name: {**document["spec"].get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in spec.items()
    }
    (folder / "job.yaml").write_text(json.dumps(document))
    used = cpu_seconds(str(Path(sys.executable).with_name("dovetail")), "run", "job.yaml", cwd=folder)
    return folder / "runs/tiny", used


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The anchor of a job: CPU seconds to import what it imports."""
    folder = tmp_path_factory.mktemp("imports")
    return min(cpu_seconds(sys.executable, "-c", "import torch, vllm", cwd=folder) for _ in range(2))


class Fed(DrawingFollower):
    """A WebSocket of a server, in memory, and the session that opens it. It has `frames` once all samples are asked
    for. Each frame is stored before the next one, so the work is the same however fast the machine is."""

    def __init__(self, samples: int, frames: list[bytes], wake: Callable[[], None]) -> None:
        self._left, self._frames, self._wake = samples, frames, wake
        self._asked, self._stored = asyncio.Event(), asyncio.Event()
        self.receive = aiter(self._messages()).__anext__

    async def ws_connect(self, *_: object, **__: object) -> Fed:
        return self

    async def __aenter__(self) -> Fed:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def send_bytes(self, message: bytes) -> None:
        self._left -= len(unpack_asked(message)[0])
        if not self._left:
            self._asked.set()

    async def _messages(self) -> AsyncIterator[aiohttp.WSMessage]:
        await self._asked.wait()
        for frame in self._frames:
            self._stored.clear()
            yield aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, frame, None)
            self._wake()
            await self._stored.wait()
        await asyncio.Event().wait()

    def progress(self, *_: int) -> None:
        self._stored.set()

    async def close(self) -> None:
        pass


async def follow(folder: Path, samples: int, frames: list[bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """CPU seconds in which the coordinator takes and stores the samples in `frames`, and bytes of memory for it."""
    store = Store(folder)
    store.samples.begin_iteration(1, [NewSample(i, 0, list(range(128)), i) for i in range(samples)])
    fleet = Fleet(time.monotonic, lambda event, **fields: None)
    fleet.publish(1)
    message = {"name": "r", "kind": "rollout", "group": "g", "url": "http://r", "ready": True, "incarnation": "1"}
    fleet.register(Register.model_validate({**message, "weight_version": 1, "abilities": {"sampler": "counter"}}))
    fed = Fed(samples, frames, lambda: [each() for each in fleet.listeners])
    monkeypatch.setattr(requests, "client_session", lambda **_: fed)
    job = job_of(store, spec=drawn_with(Generation(max_tokens=2048, max_concurrent=samples)))
    # Nothing but a frame makes the coordinator store, and no silence is too long.
    settings = GenerationSettings(flush=3600.0, stall=3600.0)
    from bench_coordinator import begin_peak, resident

    before, cpu = begin_peak(), time.process_time()
    async with Generator(job, fleet, NoWeights(), "token", settings=settings) as generator:
        with generator.open(1, 1) as turn:
            result = await generator.generate(turn, fed)
    cpu, memory = time.process_time() - cpu, resident("VmHWM") - before
    assert (result.samples, result.retries) == (samples, 0)
    store.close()
    return cpu, memory


def test_the_coordinator_follows_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 samples of 200 tokens from a server that sends 40 frames, three times."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    samples, frames, tokens = 300, 40, 5
    row = array("i", range(tokens)), array("f", [-0.5] * tokens)
    reasons = [None] * (frames - 1) + ["stop"]
    sent = [pack_rows([Row(i, *row, reason) for i in range(samples)]) for reason in reasons]
    anchor = float(subprocess.check_output([sys.executable, "-c", PLAIN_PYTHON], timeout=SECONDS))
    found = [asyncio.run(follow(tmp_path / str(i), samples, sent, monkeypatch)) for i in range(3)]
    cpu, memory = min(each for each, _ in found), max(each for _, each in found)
    within("coordinator: CPU for 1,000 rows / CPU of the anchor", cpu / anchor / (samples * frames / 1000), 2)
    within("coordinator: bytes of a row of five tokens", len(sent[0]) / samples, 57)
    within("coordinator: memory for a sample, kB", memory / samples / 1000, 30)


def test_a_rank_gets_its_part_of_a_batch() -> None:
    """256 samples for 8 ranks."""
    command = [sys.executable, str(BENCHMARKS / "bench_batches.py")]
    env = ONE_THREAD | {"RANKS": "8", "SAMPLES": "256", "SFT_TOKENS": "20000"}
    text = subprocess.check_output(command, env=env, text=True, timeout=SECONDS)
    _, built, sft, ppo = map(json.loads, text.splitlines())
    within("SFT: bytes sent to a rank for a token", 1e6 * sft["sent_mb"] / 8 / sft["tokens"], 6)
    within("PPO: bytes sent to all ranks / bytes of the batch", ppo["sent_mb"] / built["file_mb"], 1.9)
    within("PPO: memory that sending takes / bytes of the batch", ppo["peak_mb"] / built["file_mb"], 2)


def test_a_step_comes_soon(imports: float, tmp_path: Path) -> None:
    """A job of one SFT step, from the command to its end."""
    _, used = run(tmp_path, stages=["sft"], sft={"steps": 1}, groups=[TRAINER])
    within("CPU of a job of one step / CPU of importing torch and vLLM", used / imports, 5)


def test_a_job_repeats_nothing_and_keeps_its_memory(imports: float, tmp_path: Path) -> None:
    told = tmp_path / "used.jsonl"
    (tmp_path / "counted.py").write_text(COUNTED.format(told=told))
    run_dir, used = run(
        tmp_path,
        sft={"steps": 2},
        reward={"steps": 2},
        ppo={"iterations": ITERATIONS, "epochs": 1, "loss": "counted:loss"},
        groups=[TRAINER, ROLLOUT],
    )
    within("CPU of a tiny job / CPU of importing torch and vLLM", used / imports, 9)
    repeated = [each["event"] for name in REPEATED for each in events(run_dir, name)]
    within(" ".join(["retries and restarts in a healthy run", *repeated]), len(repeated), 0)
    calls = [json.loads(line) for line in told.read_text().splitlines()][-ITERATIONS * CALLS :]
    assert len(calls) == ITERATIONS * CALLS
    faults = calls[-1][0] - calls[2 * CALLS][0]
    within("page faults of a trainer in a step", faults / ((ITERATIONS - 2) * 2), 400)
    script = "import resource, torch; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    anchor = int(subprocess.check_output([sys.executable, "-c", script], env=ONE_THREAD, timeout=SECONDS))
    within("memory of a trainer / memory of a process that imported torch", calls[-1][1] / anchor, 2)
