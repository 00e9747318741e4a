"""The coordinator's own cost: its real generator and store against emulated vLLM servers in another process.

The servers (`interstage.emulated`) speak the protocol of rollout servers and only wait between the steps: what is
measured is what the coordinator spends. Prints one JSON line. SAMPLES (10000), INSTANCES (256), in so many PROCESSES
(1), STEP: seconds of a decode step (0.03), STRIDE: tokens of a sample in a step (1), INTERVAL: tokens in an event
(default: by the number of samples, as the coordinator does), MEAN: tokens of a mean response (200), LONG: one response
in so many has 32,768 tokens (0: none), KILL: 1 kills one process of servers when a quarter of the samples is done,
PROFILE: a file for cProfile. Every sample must have its own tokens in the end, each once.

A second line is about the end of an iteration: END_SAMPLES (4096) scored samples of END_TOKENS (4000) tokens become a
batch and texts, are marked, and are deleted. Each part has the longest time in which the event loop could not turn.

`lag`: how late the event loop wakes a sleeper; `turn`: CPU time of one turn of the loop, which is what lag would be at
most on a machine with nothing else to do."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from interstage.emulated import TOKENS, most_files, serve
from prometheus_client import CollectorRegistry

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.text.texts import Texts
from dovetail.coordinator.data.text.tokenizer import train
from dovetail.coordinator.loop.experience_maker import ExperienceAssembly
from dovetail.coordinator.loop.iteration_report import iteration_metrics
from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.serving.served_batches import Batches
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.samples import Assignment, Delta, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store, in_slices
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.fusion.profile import StageProfile
from dovetail.manifest.training_types import Generation
from dovetail.manifest.types import SampleLog, Stage
from dovetail.protocol.messages import Register
from dovetail.protocol.process.garbage import keep_what_is_here
from helpers.coordinated import NoWeights, drawn_with, job_of

MAX_TOKENS, LONGEST = 2048, 32768
KILLED_AT = 0.25  # of the samples
PROMPT_TOKENS = 128
LAG_PERIOD = 0.01
DEADLINE = 1200.0
START_SECONDS = 600.0
T = TypeVar("T")


def length_of(seed: int, mean: float, long: int = 0) -> int:
    """Log-normal, the longest about ten times the median. `long`: one in so many has LONGEST."""
    if long and seed % long == 0:
        return LONGEST
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
        abilities = {"sampler": "counter", "max_model_len": PROMPT_TOKENS + LONGEST}
        more = {"ready": True, "incarnation": "1", "weight_version": 1, "abilities": abilities}
        fleet.register(Register.model_validate({**message, **more}))


async def keep_reporting(fleet: Fleet, ports: list[int]) -> None:
    while True:
        await asyncio.sleep(2)
        report(fleet, ports)
        fleet.tick()


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process's memory; `VmHWM`: the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def begin_peak() -> int:
    """From now on the peak is that from now on. Returns the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the bytes that arrive on the connections that it opens."""

    received = 0

    async def create_connection(self, protocol_factory: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        def counted() -> Any:
            protocol = protocol_factory()
            take = protocol.data_received

            def data_received(data: bytes) -> None:
                self.received += len(data)
                take(data)

            protocol.data_received = data_received
            return protocol

        return await super().create_connection(counted, *args, **kwargs)


@dataclass(frozen=True)
class Load:
    """`samples` responses of `mean` tokens from `instances` servers in `processes`, with decode steps of `step` seconds
    and `stride` tokens. One response in `long` is LONGEST."""

    samples: int
    instances: int
    step: float
    mean: float
    processes: int = 1
    stride: int = 1
    long: int = 0
    settings: GenerationSettings = field(default_factory=GenerationSettings)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens by seed."""
        return {seed: length_of(seed, self.mean, self.long) for seed in range(1, self.samples + 1)}

    @contextlib.contextmanager
    def servers(self) -> Iterator[tuple[list[int], Callable[[], int]]]:
        """Their ports, and a function that kills the last process of servers and returns how many these were."""
        most_files()
        # A step takes as long with every sample of an instance as with one.
        profile = StageProfile(((1, self.step), (self.samples, self.step)), 0.0, 0.0, max_samples=self.samples)
        context, lengths, ports = multiprocessing.get_context("spawn"), self.lengths, []
        with contextlib.ExitStack() as stack:
            pipes = []
            for index in range(self.processes):
                ours, theirs = context.Pipe()
                count = len(range(index, self.instances, self.processes))
                arguments = (profile, count, lengths, PROMPT_TOKENS, theirs, self.stride)
                process = context.Process(target=serve, args=arguments)
                process.start()
                stack.callback(_end, process, ours)
                pipes.append(ours)
            for pipe in pipes:
                if not pipe.poll(START_SECONDS):
                    raise RuntimeError(f"the emulated servers did not start within {START_SECONDS:.0f} s")
                ports += pipe.recv()

            def kill() -> int:
                process.kill()
                return count

            yield ports, kill


def _end(process: Any, pipe: Any) -> None:
    with contextlib.suppress(OSError):
        pipe.send("stop")
    process.join(10)
    process.kill()


@dataclass
class Watch:
    """The lags and turns of the event loop, in seconds. Watching costs a hundred wakes a second."""

    lags: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)

    def told(self) -> dict[str, float]:
        found = {}
        for name, seconds, quantiles in (("turn", self.turns, (0.99, 1)), ("lag", self.lags, (0.5, 0.99, 1))):
            for each in quantiles:
                label = "max" if each == 1 else f"p{each * 100:.0f}"
                found[f"{name}_ms_{label}"] = round(1000 * float(np.quantile(seconds, each)), 2)
        return found


class Killer(DrawingFollower):
    """Kills servers when KILLED_AT of the samples are done. They report no more."""

    def __init__(self, ports: list[int], kill: Callable[[], int]) -> None:
        self._ports, self._kill = ports, kill
        self.killed = 0

    def progress(self, done: int, total: int, tokens: int) -> None:
        if not self.killed and done >= KILLED_AT * total:
            self.killed = self._kill()
            del self._ports[-self.killed :]


async def coordinate(
    folder: Path, ports: list[int], load: Load, watch: Watch | None = None, kill: Callable[[], int] | None = None
) -> dict[str, Any]:
    """One iteration's samples. Raises RuntimeError if a sample is not answered as it should."""
    store = Store(folder)
    prompt = list(range(PROMPT_TOKENS))
    store.samples.begin_iteration(1, [NewSample(i, 0, prompt, seed) for i, seed in enumerate(load.lengths)])
    fleet = Fleet(time.monotonic, lambda event, **fields: None)
    fleet.publish(1)
    report(fleet, ports)
    generation = Generation.model_validate({"maxTokens": LONGEST if load.long else MAX_TOKENS, "maxConcurrent": 256})
    killer = None if kill is None else Killer(ports, kill)
    keep_what_is_here()
    before = begin_peak()
    job = job_of(store, spec=drawn_with(generation))
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CountingLoop)
    async with Generator(job, fleet, NoWeights(), "token", settings=load.settings) as generator:
        others = [asyncio.create_task(keep_reporting(fleet, ports))]
        if watch is not None:
            others.append(asyncio.create_task(watch_lag(watch.lags)))
            watch_turns(watch.turns)
        cpu, received = time.process_time(), loop.received
        async with asyncio.timeout(DEADLINE):
            with generator.open(1, 1) as turn:
                result = await generator.generate(turn, killer or DrawingFollower())
        cpu, received = time.process_time() - cpu, loop.received - received
        for task in others:
            task.cancel()
    peak = resident("VmHWM")
    wrong = [
        s.key
        for s in store.samples.samples(1)
        if s.state is not State.GENERATED or s.tokens.tolist() != TOKENS[: length_of(s.seed, load.mean, load.long)]
    ]
    if wrong:
        raise RuntimeError(f"{len(wrong)} samples were not answered as they should, the first {wrong[0]}")
    store.close()
    return {
        "samples": result.samples,
        "tokens": result.tokens,
        "retries": result.retries,
        "killed": killer.killed if killer is not None else 0,
        "seconds": round(result.seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "cpu_ms_per_sample": round(1000 * cpu / result.samples, 3),
        "cpu_us_per_token": round(1e6 * cpu / result.tokens, 2),
        "cpu_share": round(cpu / result.seconds, 3),
        "bytes_per_token": round(received / result.tokens, 1),
        "memory_mb": round((peak - before) / 1e6, 1),
        **(watch.told() if watch is not None else {}),
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
    assembly = ExperienceAssembly(store, Texts(tokenizer), 0, None, False)
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
    def given(name: str, otherwise: float) -> float:
        return float(os.environ.get(name, otherwise))

    settings = GenerationSettings()
    if "INTERVAL" in os.environ:
        settings = replace(settings, stream_interval=int(os.environ["INTERVAL"]))
    load = Load(
        int(given("SAMPLES", 10000)),
        int(given("INSTANCES", 256)),
        given("STEP", 0.03),
        given("MEAN", 200),
        int(given("PROCESSES", 1)),
        int(given("STRIDE", 1)),
        int(given("LONG", 0)),
        settings,
    )
    profiler = cProfile.Profile() if "PROFILE" in os.environ else None
    with load.servers() as (ports, kill), tempfile.TemporaryDirectory() as folder:
        if profiler is not None:
            profiler.enable()
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            killing = kill if given("KILL", 0) else None
            result = runner.run(coordinate(Path(folder), ports, load, Watch(), killing))
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(os.environ["PROFILE"])
    # The longest response, never waiting for the coordinator.
    ideal = round(load.step * max(load.lengths.values()) / load.stride, 2)
    loaded = {"instances": load.instances, "step_seconds": load.step, "ideal_seconds": ideal, **asdict(settings)}
    print(json.dumps({"benchmark": "coordinator", **result, **loaded}))
    many, long = int(os.environ.get("END_SAMPLES", "4096")), int(os.environ.get("END_TOKENS", "4000"))
    with tempfile.TemporaryDirectory() as folder:
        ended = asyncio.run(end_iteration(Path(folder), many, long))
    print(json.dumps({"benchmark": "coordinator, end of an iteration", **ended}))


if __name__ == "__main__":
    main()
