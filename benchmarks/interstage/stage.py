"""One stage of generation and inference by the coordinator's own code, on emulated instances."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from dovetail.api.messages import Register, Span
from dovetail.api.types import Generation, RLHFJobSpec
from dovetail.coordinator.fleet import Fleet
from dovetail.coordinator.generation import Generator
from dovetail.coordinator.interstage.fusion import Fusion, StageFusion
from dovetail.coordinator.interstage.stage import generate_and_score
from dovetail.coordinator.samples import NewSample, ScoreRow, State
from dovetail.coordinator.scoring import Inference, Scorer, Scores
from dovetail.coordinator.store import Store
from dovetail.coordinator.work import Generated
from dovetail.planner.interstage import Decision, Prediction, StageProfile
from interstage.emulated import serve

DEADLINE = 600.0


@contextmanager
def instances(profile: StageProfile, count: int, lengths: Sequence[int], prompt: int) -> Iterator[list[int]]:
    """Ports of `count` emulated instances; sample i answers with lengths[i] tokens."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    table = {seed + 1: length for seed, length in enumerate(lengths)}
    process = context.Process(target=serve, args=(profile, count, table, prompt, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(120):
            raise RuntimeError("the emulated instances did not start within 120 s")
        yield ours.recv()
    finally:
        ours.close()
        process.join(10)
        process.kill()


def decided(threshold: int | None, prediction: Prediction) -> Decision:
    return Decision(threshold, None, "pinned", prediction, prediction.serial_seconds, prediction.fused_seconds, {})


@dataclass(frozen=True)
class Measured:
    """`seconds` of the stage, `generation` of its generation; `gap`: that a migrated sample stood still, on average."""

    seconds: float
    generation: float
    migrated: int
    gap: float
    done: Generated
    scoring: list[Span]


async def measure(
    ports: Sequence[int],
    lengths: Sequence[int],
    prompt: int,
    profile: StageProfile,
    decision: Decision,
    max_tokens: int,
) -> Measured:
    """One stage. Raises RuntimeError unless every sample ends scored, with its own length."""
    fleet = Fleet(time.monotonic, lambda event, **fields: None)
    fleet.publish(1)
    for index, port in enumerate(ports):
        for kind, name in (("rollout", f"r{index:03}"), ("scorer", f"r{index:03}-scorer")):
            message = {"name": name, "kind": kind, "group": "g", "url": f"http://127.0.0.1:{port}"}
            more = {"ready": True, "incarnation": "1", "weight_version": 1, "abilities": {"sampler": "counter"}}
            fleet.register(Register.model_validate({**message, **more}))
    scorers = [Scorer(f"r{index:03}-scorer", f"http://127.0.0.1:{port}") for index, port in enumerate(ports)]
    rollouts = fleet.eligible("rollout")
    fusion = StageFusion({i.name: profile for i in rollouts}, prompt + max_tokens, decision)
    generation = Generation.model_validate({"maxTokens": max_tokens, "maxConcurrent": profile.max_samples})
    spent: dict[str, float] = {}
    scoring: list[Span] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        spent[name] = time.monotonic() - started

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        tokens = list(range(prompt))
        store.samples.begin_iteration(1, [NewSample(i, 0, tokens, i + 1) for i in range(len(lengths))])

        def keep(scores: list[Scores]) -> None:
            store.samples.score(ScoreRow(s.key, s.ref_logprobs, s.values, s.score, 1) for s in scores)

        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            Generator(store, fleet, generation, "token", lambda event, **fields: None) as generator,
            Inference(
                session,
                ["reference", "reward", "critic"],
                lambda: [s for s in scorers if fusion.may_score(s.name, generator.idle)],
                keep,
                lambda scorer, reason: None,
                on_span=scoring.append,
                everyone=lambda: len(scorers),
            ) as inference,
        ):
            done = await generate_and_score(1, store.samples, generator, inference, fusion, DEADLINE, phase)
        found = store.samples.samples(1)
        wrong = [
            s.key for s, n in zip(found, lengths, strict=True) if s.state is not State.SCORED or len(s.tokens) != n
        ]
        store.close()
    if wrong:
        raise RuntimeError(f"{len(wrong)} samples did not end scored and whole, the first {wrong[0]}")
    gap = statistics.fmean(m.seconds for m in done.migrations) if done.migrations else 0.0
    return Measured(sum(spent.values()), spent["generation"], len(done.migrations), gap, done, scoring)


@contextmanager
def memory(folder: Path, max_tokens: int, max_samples: int) -> Iterator[Fusion]:
    """A job's memory of earlier stages, empty."""
    groups = [{"name": "rollout", "roles": ["rollout"]}, {"name": "train", "roles": ["trainer"]}]
    generation = {"maxTokens": max_tokens, "maxConcurrent": max_samples}
    models: dict[str, Any] = {"actor": {"source": {"scratch": {}}}}
    spec = RLHFJobSpec.model_validate({"models": models, "generation": generation, "groups": groups})
    store = Store(folder)
    try:
        yield Fusion(spec, store, lambda event, **fields: None)
    finally:
        store.close()


def learn(fusion: Fusion, found: Measured) -> StageProfile:
    """What a job would know of its instances after such a stage."""
    groups = dict.fromkeys(found.done.instances, "g") | {s.process: "g" for s in found.scoring}
    fusion.learn(groups, found.done, found.scoring)
    return fusion.measured("g").profile()


def lengths_of(count: int, max_tokens: int, seed: int) -> list[int]:
    """Log-normal, the median an eighth of the longest."""
    rng = np.random.default_rng(seed)
    drawn = max_tokens / 8 * np.exp(np.log(8) / 2.4 * rng.standard_normal(count))
    return [int(n) for n in np.clip(np.rint(drawn), 1, max_tokens)]
