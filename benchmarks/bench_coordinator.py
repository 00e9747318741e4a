"""The coordinator's own cost: its real generator and store against emulated vLLM servers in another process.

The servers (`interstage.emulated`) speak vLLM's streaming protocol over HTTP and only wait between the steps: what is
measured is what the coordinator spends. Prints one JSON line. SAMPLES (10000), INSTANCES (256), STEP: seconds of a
decode step (0.03), INTERVAL: tokens in an event (default: by the number of samples, as the coordinator does), MEAN:
tokens of a mean response (200), PROFILE: a file for cProfile.

`lag`: how late the event loop wakes a sleeper; `turn`: CPU time of one turn of the loop, which is what lag would be at
most on a machine with nothing else to do."""

from __future__ import annotations

import asyncio
import cProfile
import json
import multiprocessing
import os
import resource
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from interstage.emulated import most_files, serve

from dovetail.coordinator.fleet.fleet import Fleet
from dovetail.coordinator.generation.generator import Generator
from dovetail.coordinator.generation.in_flight import GenerationSettings
from dovetail.coordinator.store.samples import NewSample, State
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import Generation
from dovetail.planner.simulate import StageProfile
from dovetail.protocol.messages import Register

MAX_TOKENS = 2048
PROMPT_TOKENS = 128
LAG_PERIOD = 0.01
DEADLINE = 1200.0


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
    async with Generator(store, fleet, generation, "token", lambda event, **fields: None, settings) as generator:
        others = [asyncio.create_task(watch_lag(lags)), asyncio.create_task(keep_reporting(fleet, ports))]
        watch_turns(turns)
        cpu = time.process_time()
        async with asyncio.timeout(DEADLINE):
            result = await generator.generate(1)
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


if __name__ == "__main__":
    main()
