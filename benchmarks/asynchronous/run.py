"""A run of the real coordinator with emulated processes, and what was measured of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import yaml
from interstage.stage import Rule

from asynchronous.world import TOKEN, Busy, Interval, World, length_of, serve
from dovetail.coordinator.loop.engines import CoordinatorSettings, Engines
from dovetail.fusion.profile import StageProfile
from dovetail.launch.ports import PortReservation
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.training_types import kept_versions
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.sampling import sample_seed

MANIFEST = """
apiVersion: dovetail.dev/v1beta1
kind: RLHFJob
metadata: {name: bench-async}
spec:
  models:
    actor:
      source:
        scratch:
          architecture: llama
          config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,
                   num_key_value_heads: 2, max_position_embeddings: 4096, tie_word_embeddings: false}
    tokenizer: {train: {vocabSize: 300}}
  data:
    demonstrations: [{synthetic: {size: 200}}]
    preferences: [{synthetic: {size: 200}}]
    maxPromptTokens: 128
  checkpoint: {everySteps: 1000}
"""


@dataclass(frozen=True)
class Job:
    """`samples`: of each instance in an iteration. The rest: see
    `World`."""

    instances: int
    samples: int
    max_tokens: int
    iterations: int
    profile: StageProfile
    weights: float
    token_seconds: float

    @property
    def batch(self) -> int:
        return self.instances * self.samples

    def spec(self, lag: int) -> RLHFJobSpec:
        document = yaml.safe_load(MANIFEST)
        document["spec"]["data"]["prompts"] = [{"synthetic": {"size": 2 * self.batch}}]
        document["spec"] |= {
            "groups": [
                {"name": "trainers", "roles": ["trainer"], "replicas": 1},
                {"name": "rollouts", "roles": ["rollout"], "replicas": self.instances},
            ],
            "generation": {"maxTokens": self.max_tokens, "maxConcurrent": self.profile.max_samples},
            "ppo": {
                "lag": lag,
                "iterations": self.iterations,
                "globalBatchSize": self.batch,
                "miniBatchSize": self.batch,
                "microBatchSize": 1,
            },
        }
        return resolve(parse(document).spec)

    def lengths(self, iteration: int) -> list[int]:
        """Tokens of each sample's response."""
        seed = self.spec(0).seed
        return [length_of(sample_seed(seed, iteration, row, 0), self.max_tokens) for row in range(self.batch)]


@dataclass(frozen=True)
class Ran:
    """`metrics`: the rows of history.jsonl. `ends`: of each iteration, monotonic seconds; the first is the begin of
    PPO's first iteration. `prompts`: tokens of each prompt, by iteration; `rules`: when the tail was gathered. `known`:
    what the coordinator measured of an instance."""

    metrics: list[dict[str, float]]
    ends: list[float]
    busy: Busy
    prompts: list[list[int]]
    rules: list[Rule]
    known: StageProfile

    def seconds(self, first: int, last: int) -> float:
        """An iteration's, mean over the iterations `first` to `last` (from 1)."""
        return (self.ends[last] - self.ends[first - 1]) / (last - first + 1)

    def idle(self, first: int, last: int) -> tuple[float, float]:
        """Shares of the time in which the trainers do nothing, and a rollout, while these iterations end."""
        window = self.ends[first - 1], self.ends[last]
        rollouts = statistics.fmean(_busy(each, window) for each in self.busy.instances)
        return 1 - _busy(self.busy.trainers, window), 1 - rollouts

    def mean(self, name: str, first: int, last: int) -> float:
        """Of a metric."""
        return statistics.fmean(row.get(name, 0.0) for row in self.metrics[first - 1 : last])


def _busy(intervals: Sequence[Interval], window: Interval) -> float:
    """Share of the window that any interval covers."""
    covered, until = 0.0, window[0]
    for begin, end in sorted(intervals):
        begin, end = max(begin, until), min(end, window[1])
        if end > begin:
            covered, until = covered + end - begin, end
    return covered / (window[1] - window[0])


def run(job: Job, lag: int, folder: Path) -> Ran:
    """The job from its first iteration to its last, in a new run directory `folder`."""
    folder.mkdir()
    ports = PortReservation()
    port = ports.reserve(["coordinator"])["coordinator"]
    url = f"http://127.0.0.1:{port}"
    kept = kept_versions(lag)
    world = World(url, job.instances, job.profile, job.max_tokens, job.weights, job.token_seconds, kept)
    with closing(ports), emulated(world) as pipe:
        return asyncio.run(_run(job, lag, CoordinatorSettings(folder, TOKEN, "127.0.0.1", port, folder), pipe))


async def _run(job: Job, lag: int, settings: CoordinatorSettings, pipe: Pipe) -> Ran:
    clock = asyncio.get_running_loop().time
    spec = job.spec(lag)
    rules: dict[int, Rule] = {}

    def log(event: str, **told: Any) -> None:
        if event == "fusion.decided":
            rules[told["iteration"]] = told["threshold"], told["roomy"]

    async with Engines(spec, make_plan(spec), settings, log) as engines:
        # No answers to held-out prompts.
        engines.records.store.put("evaluation/before_ppo", 0)
        rows: list[dict[str, float]] = []

        async def iterate() -> list[float]:
            await engines.begin_ppo()
            ends = [clock()]
            while engines.iteration < spec.ppo.iterations:
                experience = await engines.generate_experience()
                rows.append(await engines.train(experience))
                ends.append(clock())
            return ends

        ends = await engines.guard(iterate())
        pipe.send("busy")
        busy = await asyncio.to_thread(pipe.recv)
        prompts = [[len(p.token_ids) for p in engines.prepared.prompts(i)] for i in range(1, spec.ppo.iterations + 1)]
        known = engines._devices._fusion.measured("rollouts").profile()
        decided = [rules.get(i, (None, False)) for i in range(1, spec.ppo.iterations + 1)]
        return Ran(rows, ends, busy, prompts, decided, known)


@contextmanager
def emulated(world: World) -> Iterator[Pipe]:
    """The other processes of a job; asked through the pipe, they say what was busy when."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(world, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(10)
        process.kill()
