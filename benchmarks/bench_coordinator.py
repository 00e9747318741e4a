"""The coordinator's own cost: its real generator and store against emulated vLLM servers in another process.

The servers (`interstage.emulated`) speak vLLM's streaming protocol over HTTP and only wait between the steps: what is
measured is what the coordinator spends. Prints one JSON line. SAMPLES (10000), INSTANCES (256), STEP: seconds of a
decode step (0.03), INTERVAL: tokens in an event (default: by the number of samples, as the coordinator does), MEAN:
tokens of a mean response (200), PROFILE: a file for cProfile.

A second line is about the end of an iteration: END_SAMPLES (4096) scored samples of END_TOKENS (4000) tokens become a
batch and texts, are marked, and are deleted. Each part has the longest time in which the event loop could not turn.

`lag`: how late the event loop wakes a sleeper; `turn`: CPU time of one turn of the loop, which is what lag would be at
most on a machine with nothing else to do."""

from __future__ import annotations

import asyncio
import cProfile
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from interstage.emulated import most_files, serve
from prometheus_client import CollectorRegistry

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.text.texts import Texts
from dovetail.coordinator.data.text.tokenizer import train
from dovetail.coordinator.loop.experience_maker import ExperienceAssembly
from dovetail.coordinator.loop.iteration_metrics import iteration_metrics
from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.serving.served_batches import Batches
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.samples import Assignment, Delta, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store, in_slices
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.fusion.profile import StageProfile
from dovetail.manifest.types import Generation, SampleLog, Stage
from dovetail.protocol.messages import Register
from helpers.coordinated import NoWeights, drawn_with, job_of

MAX_TOKENS = 2048
PROMPT_TOKENS = 128
LAG_PERIOD = 0.01
DEADLINE = 1200.0
T = TypeVar("T")


def length_of(seed: int, mean: float) -> int:
    """Log-normal, the longest about ten times the median."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.745**2 / 2, 0.745)
    return int(np.clip(np.rint(drawn), 1, MAX_TOKENS))


async def watch_lag(lags: list[float]) -> None:
    """How much later than asked the event loop wakes a sleeper."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD)
        lags.append(time.perf_counter() - before - LAG_PERIOD)


def watch_turns(turns: list[float]) -> None:
    """CPU seconds that the event loop computes between two looks at its sockets."""
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    original, last = selector.select, time.thread_time()

    def select(timeout: float | None = None) -> Any:
        nonlocal last
        turns.append(time.thread_time() - last)
        found = original(timeout)
        last = time.thread_time()
        return found

    selector.select = select


def report(fleet: Fleet, ports: list[int]) -> None:
    """What every rollout posts every 2 s."""
    for index, port in enumerate(ports):
        message = {"name": f"r{index:03}", "kind": "rollout", "group": "g", "url": f"http://127.0.0.1:{port}"}
        abilities = {"sampler": "counter", "max_model_len": 4096}
        more = {"ready": True, "incarnation": "1", "weight_version": 1, "abilities": abilities}
        fleet.register(Register.model_validate({**message, **more}))


async def keep_reporting(fleet: Fleet, ports: list[int]) -> None:
    while True:
        await asyncio.sleep(2)
        report(fleet, ports)
        fleet.tick()


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


async def coordinate(
    folder: Path, ports: list[int], samples: int, mean: float, settings: GenerationSettings
) -> dict[str, Any]:
    store = Store(folder)
    seeds = list(range(1, samples + 1))
    prompt = list(range(PROMPT_TOKENS))
    store.samples.begin_iteration(1, [NewSample(i, 0, prompt, seed) for i, seed in enumerate(seeds)])
    fleet = Fleet(time.monotonic, lambda event, **fields: None)
    fleet.publish(1)
    report(fleet, ports)
    generation = Generation.model_validate({"maxTokens": MAX_TOKENS, "maxConcurrent": 256})
    lags: list[float] = []
    turns: list[float] = []
    before = resident()
    job = job_of(store, spec=drawn_with(generation))
    async with Generator(job, fleet, NoWeights(), "token", settings=settings) as generator:
        others = [asyncio.create_task(watch_lag(lags)), asyncio.create_task(keep_reporting(fleet, ports))]
        watch_turns(turns)
        cpu = time.process_time()
        async with asyncio.timeout(DEADLINE):
            with generator.open(1, 1) as turn:
                result = await generator.generate(turn)
        cpu = time.process_time() - cpu
        for task in others:
            task.cancel()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    wrong = [
        s.key
        for s in store.samples.samples(1)
        if s.state is not State.GENERATED or len(s.tokens) != length_of(s.seed, mean)
    ]
    if wrong:
        raise RuntimeError(f"{len(wrong)} samples were not answered as they should, the first {wrong[0]}")
    store.close()
    return {
        "samples": result.samples,
        "tokens": result.tokens,
        "retries": result.retries,
        "seconds": round(result.seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "cpu_ms_per_sample": round(1000 * cpu / result.samples, 3),
        "cpu_us_per_token": round(1e6 * cpu / result.tokens, 2),
        "cpu_share": round(cpu / result.seconds, 3),
        "memory_mb": round((peak - before) / 1e6, 1),
        "turn_ms_p99": round(1000 * float(np.quantile(turns, 0.99)), 2),
        "turn_ms_max": round(1000 * max(turns), 1),
        "lag_ms_p50": round(1000 * float(np.quantile(lags, 0.5)), 2),
        "lag_ms_p99": round(1000 * float(np.quantile(lags, 0.99)), 2),
        "lag_ms_max": round(1000 * max(lags), 1),
    }


class Turns:
    """The longest turn of the event loop in each part of the work, in milliseconds of CPU time and by the clock."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.clock: dict[str, float] = {}
        self._turns: list[float] = []
        self._lags: list[float] = []
        watch_turns(self._turns)
        self._watch = asyncio.create_task(watch_lag(self._lags))

    async def part(self, name: str, work: Awaitable[T]) -> T:
        await asyncio.sleep(2 * LAG_PERIOD)
        self._turns.clear(), self._lags.clear()
        result = await work
        await asyncio.sleep(2 * LAG_PERIOD)
        self.cpu[name], self.clock[name] = (round(1000 * max(each), 1) for each in (self._turns, self._lags))
        return result

    def close(self) -> None:
        self._watch.cancel()


def scored(store: Store, samples: int, tokens: int, vocabulary: int) -> None:
    """An iteration whose samples are all scored, eight of each prompt."""
    rng = np.random.default_rng(0)
    store.samples.begin_iteration(1, [NewSample(i // 8, i % 8, range(PROMPT_TOKENS), i + 1) for i in range(samples)])
    logprobs = rng.normal(-1, 0.1, tokens).astype(np.float32)
    for sample in store.samples.samples(1):
        (attempt,) = store.samples.assign([Assignment(sample.key, "r", "1", 0, 0)])
        drawn = rng.integers(2, vocabulary, tokens).astype(np.int32)
        store.samples.record([Delta(sample.key, attempt, 0, drawn, logprobs, "length")])
        store.samples.score([ScoreRow(sample.key, logprobs, logprobs, float(sample.seed % 7), 0)])


async def end_iteration(folder: Path, samples: int, tokens: int) -> dict[str, Any]:
    """What the loop of a job does with an iteration whose samples are all scored."""
    tokenizer = train((f"the cat number {i} is soft and it has fur" for i in range(3000)), 8000)
    store, files = Store(folder), ExperienceFiles(folder)
    scored(store, samples, tokens, len(tokenizer))
    spec: Any = SimpleNamespace(samples=SampleLog(), stages=[Stage.PPO], ppo=SimpleNamespace(iterations=1), seed=0)
    records = RunRecords.of(folder, store, spec, CollectorRegistry(), lambda *_, **__: None)
    assembly = ExperienceAssembly(store.samples, Texts(tokenizer), 0, None)
    prompts = [PromptRecord(i, "prompt", list(range(PROMPT_TOKENS)), {}) for i in range(-(-samples // 8))]
    turns, began = Turns(), time.perf_counter()
    made = await turns.part("experience", asyncio.to_thread(assembly.experience, 1, 0, prompts))
    store.put("ppo/1/batch", await turns.part("write", asyncio.to_thread(files.write, 1, made.arrays)))
    await turns.part("texts", records.keep_text(spec.samples, made))
    await turns.part("mark", in_slices(lambda rows: store.samples.advance(1, State.IN_BATCH, rows)))
    await turns.part("serve", Batches(None, files, store).fetch("ppo/1"))
    await turns.part("metrics", asyncio.to_thread(iteration_metrics, made.arrays, {}))
    store.samples.advance(1, State.TRAINED)
    await turns.part("delete", in_slices(lambda rows: store.samples.forget_before(2, rows)))
    seconds = time.perf_counter() - began
    turns.close()
    records.close()
    return {
        "samples": samples,
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "turn_ms": turns.cpu,
        "lag_ms": turns.clock,
    }


def main() -> None:
    samples, instances = int(os.environ.get("SAMPLES", "10000")), int(os.environ.get("INSTANCES", "256"))
    step, mean = float(os.environ.get("STEP", "0.03")), float(os.environ.get("MEAN", "200"))
    settings = GenerationSettings()
    if "INTERVAL" in os.environ:
        settings = replace(settings, stream_interval=int(os.environ["INTERVAL"]))
    most_files()
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    lengths = {seed: length_of(seed, mean) for seed in range(1, samples + 1)}
    # A step takes as long with every sample of an instance as with one.
    profile = StageProfile(((1, step), (samples, step)), 0.0, 0.0, max_samples=samples)
    process = context.Process(target=serve, args=(profile, instances, lengths, PROMPT_TOKENS, theirs), daemon=True)
    process.start()
    if not ours.poll(60):
        raise RuntimeError("the emulated servers did not start within 60 s")
    ports = ours.recv()
    profiler = cProfile.Profile() if "PROFILE" in os.environ else None
    # The longest response, never waiting for the coordinator.
    ideal = step * max(lengths.values())
    try:
        with tempfile.TemporaryDirectory() as folder:
            if profiler is not None:
                profiler.enable()
            result = asyncio.run(coordinate(Path(folder), ports, samples, mean, settings))
            if profiler is not None:
                profiler.disable()
                profiler.dump_stats(os.environ["PROFILE"])
    finally:
        ours.send("stop")
        process.join(10)
        process.kill()
    load = {"instances": instances, "step_seconds": step, "ideal_seconds": round(ideal, 2), **asdict(settings)}
    print(json.dumps({"benchmark": "coordinator", **result, **load}))
    many, long = int(os.environ.get("END_SAMPLES", "4096")), int(os.environ.get("END_TOKENS", "4000"))
    with tempfile.TemporaryDirectory() as folder:
        ended = asyncio.run(end_iteration(Path(folder), many, long))
    print(json.dumps({"benchmark": "coordinator, end of an iteration", **ended}))


if __name__ == "__main__":
    main()
