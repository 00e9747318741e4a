"""One stage of generation and inference by the coordinator's own code, on emulated instances."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import aiohttp
import numpy as np

from dovetail.coordinator.samples.fusion.fused_stage import FusedStage
from dovetail.coordinator.samples.fusion.fusion import Fusion, StageFusion
from dovetail.coordinator.samples.fusion.threshold import Decision
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.scoring import Inference, Scorer, Scores
from dovetail.coordinator.store.samples import NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, Timeouts
from dovetail.fusion.profile import StageProfile
from dovetail.fusion.stage import StagePrediction
from dovetail.manifest.training_types import Generation
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.messages import Register, Span
from helpers.coordinated import NoWeights, ScorerPool, drawn_with, job_of
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


# A threshold, and whether destinations take what they have room for (`StageProfile.roomy`).
Rule = tuple[int | None, bool]


def decided(rule: Rule, prediction: StagePrediction) -> Decision:
    expected = prediction.serial_seconds, prediction.fused_seconds
    return Decision(rule[0], None, "pinned", prediction, *expected, {}, rule[1])


@dataclass(frozen=True)
class Measured:
    """`seconds` of the stage, `generation` of its generation; `gap`: that a migrated sample stood still, on average."""

    seconds: float
    generation: float
    migrated: int
    gap: float
    done: Generated
    scoring: list[Span]
    lengths: list[int]


@dataclass(frozen=True)
class Place:
    """A server and its scorer, by their addresses; `abilities`: what the server announces."""

    rollout: str
    scorer: str
    abilities: dict[str, Any]


def emulated(ports: Sequence[int]) -> list[Place]:
    """Those of `instances`."""
    return [Place(*[f"http://127.0.0.1:{port}"] * 2, {"sampler": "counter"}) for port in ports]


def alike(count: int, prompt: int) -> list[NewSample]:
    """Samples for `instances`, with different prompts of so many tokens."""
    return [NewSample(i, 0, [i, *range(1, prompt)], i + 1) for i in range(count)]


async def measure(
    places: Sequence[Place],
    samples: Sequence[NewSample],
    profile: StageProfile,
    decision: Decision,
    max_tokens: int,
    lengths: Sequence[int] | None = None,
    token: str = "token",
) -> Measured:
    """One stage. Raises RuntimeError unless every sample ends scored, with its own length if `lengths` are given."""
    fleet = Fleet(time.monotonic, lambda event, **fields: None, Timeouts(suspect=DEADLINE, dead=DEADLINE))
    fleet.publish(1)
    for index, place in enumerate(places):
        for kind, name, url in (
            ("rollout", f"r{index:03}", place.rollout),
            ("scorer", f"r{index:03}-scorer", place.scorer),
        ):
            message = {"name": name, "kind": kind, "group": "g", "url": url, "abilities": place.abilities}
            more = {"ready": True, "incarnation": "1", "weight_version": 1}
            fleet.register(Register.model_validate({**message, **more}))
    room = len(samples[0].prompt_tokens) + max_tokens if profile.block_tokens else 0
    scorers = [Scorer(f"r{index:03}-scorer", place.scorer, room=room) for index, place in enumerate(places)]
    rollouts = fleet.eligible("rollout")
    longest = max(len(s.prompt_tokens) for s in samples) + max_tokens
    fusion = StageFusion({i.name: profile for i in rollouts}, longest, decision)
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
        store.samples.begin_iteration(1, samples)
        job = job_of(store, spec=drawn_with(generation), start_seconds=600.0)

        def keep(scores: list[Scores]) -> None:
            store.samples.score(ScoreRow(s.key, s.ref_logprobs, s.values, s.score, 1) for s in scores)

        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers={"Authorization": f"Bearer {token}"}
            ) as session,
            Generator(job, fleet, NoWeights(), token) as generator,
            Inference(
                ScorerPool(
                    session,
                    lambda: [s for s in scorers if fusion.may_score(s.name, generator.idle)],
                    count=len(scorers),
                ),
                ["reference", "reward", "critic"],
                keep,
                scoring.append,
            ) as inference,
        ):
            with generator.open(1, 1) as turn:
                stage = FusedStage(turn, store.samples, generator, inference, fusion)
                done = await stage.run(DEADLINE, phase)
        found = store.samples.samples(1)
        made = [len(s.tokens) for s in found]
        wrong = [
            s.key
            for s, n in zip(found, lengths or made, strict=True)
            if s.state is not State.SCORED or len(s.tokens) != n
        ]
        store.close()
    if wrong:
        raise RuntimeError(f"{len(wrong)} samples did not end scored and whole, the first {wrong[0]}")
    gap = statistics.fmean(m.seconds for m in done.migrations) if done.migrations else 0.0
    return Measured(sum(spent.values()), spent["generation"], len(done.migrations), gap, done, scoring, made)


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
