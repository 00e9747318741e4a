"""The coordinator's pure parts: batches for scorers, experience arrays and files, summaries, receivers' ranks."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from dovetail.coordinator.reporting.results import build, mean_ci95
from dovetail.coordinator.samples.scoring import Finished, Inference, Scorer, Scores, Waiting
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.workers.publishing import Target, receivers_of
from dovetail.protocol.experience import Experience, kl_per_sample
from dovetail.protocol.files.durable import write_json
from dovetail.protocol.wire import pack, unpack
from helpers.coordinated import ScorerPool


def finished(prompt: int, response: int, index: int = 0, sample: int = 0) -> Finished:
    return Finished(Key(1, index, sample), np.full(prompt, 7, np.int32), np.full(response, 8, np.int32))


@given(st.lists(st.integers(2, 300), min_size=1, max_size=200), st.integers(1, 20))
def test_batches_are_the_longest_samples_within_the_limits(lengths: list[int], scorers: int) -> None:
    waiting = Waiting(finished(1, n - 1, i) for i, n in enumerate(lengths))
    batch = {s.key.prompt for s in waiting.take(scorers, least=100, most=600)}
    assert len(batch) >= 1
    rest = [n for i, n in enumerate(lengths) if i not in batch]
    longest = max(lengths)
    assert not rest or min(lengths[i] for i in batch) >= max(rest)
    assert len(batch) == 1 or len(batch) * longest <= 600
    assert not rest or (len(batch) + 1) * longest > min(100, sum(lengths) // (3 * scorers))


@given(
    st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(0, 90), min_size=1, max_size=9)), min_size=1),
    st.integers(1, 6),
    st.booleans(),
)
def test_samples_of_a_prompt_share_a_batch_unless_each_part_is_worth_one(
    prompts: list[tuple[int, list[int]]], scorers: int, fails: bool
) -> None:
    left = {
        Key(1, index, sample): n for index, (_, responses) in enumerate(prompts) for sample, n in enumerate(responses)
    }
    waiting = Waiting(finished(prompts[key.prompt][0], n, key.prompt, key.sample) for key, n in left.items())
    if fails:
        # As when a scorer fails: a batch comes back.
        waiting.add(waiting.take(scorers, least=300, most=2000))
    while waiting:
        batch = waiting.take(scorers, least=300, most=2000)
        taken = {s.key: left.pop(s.key) for s in batch}
        assert len(taken) == len(batch) >= 1
        for index in {key.prompt for key in taken}:
            prompt = prompts[index][0]
            parts = [[n for key, n in part.items() if key.prompt == index] for part in (taken, left)]
            assert not parts[1] or all(sum(part) >= prompt and prompt + sum(part) >= 300 for part in parts)
    assert not left


def test_siblings_go_to_one_scorer_together_however_long_the_others_are() -> None:
    waiting = Waiting(finished(128, n, index, s) for s, n in enumerate((40, 50, 60, 70)) for index in range(4))
    assert {s.key for s in waiting.take(4)} == {Key(1, 0, s) for s in range(4)}


class FakeScorer:
    """Scores a sample by its length; `broken` answers what a failing scorer would."""

    def __init__(self, broken: str | None = None) -> None:
        self.broken = broken
        self.calls = 0

    async def handle(self, request: web.Request) -> web.Response:
        self.calls += 1
        if self.broken == "status":
            return web.Response(status=500, text="out of memory")
        arrays = unpack(await request.read())
        n, longest = len(arrays["tokens"]), int(arrays["response_lengths"].max())
        scores = (arrays["prompt_lengths"] + arrays["response_lengths"]).astype(np.float32)
        if self.broken == "nan":
            scores[0] = np.nan
        full = np.ones((n, longest), np.float32)
        return web.Response(body=pack({"scores": scores, "ref_logprobs": -full, "values": full}))


async def serve(*scorers: FakeScorer) -> tuple[list[web.AppRunner], list[Scorer]]:
    runners, found = [], []
    for index, scorer in enumerate(scorers):
        app = web.Application()
        app.router.add_post("/v1/score", scorer.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        runners.append(runner)
        found.append(Scorer(f"scorer-{index}", f"http://127.0.0.1:{port}"))
    return runners, found


def run_scoring(
    scorers: list[FakeScorer], waves: list[list[Finished]], deadline: float = 20.0, refuse: str | None = None
) -> tuple[dict[Key, Scores], list[str]]:
    """Add waves of samples one after the other, each while the last may still be scored."""
    failures: list[str] = []
    found: dict[Key, Scores] = {}

    async def scenario() -> None:
        runners, servers = await serve(*scorers)
        alive = {s.name: s for s in servers}

        def fail(scorer: Scorer, reason: str) -> None:
            failures.append(reason)
            alive.pop(scorer.name, None)

        def keep(scores: list[Scores]) -> None:
            if refuse is not None:
                raise StoreError(refuse)
            assert not found.keys() & {s.key for s in scores}
            found.update((s.key, s) for s in scores)

        try:
            async with aiohttp.ClientSession() as session:
                want = ["reference", "reward", "critic"]
                async with Inference(ScorerPool(session, lambda: list(alive.values()), fail), want, keep) as inference:
                    for wave in waves:
                        inference.add(wave)
                        await asyncio.sleep(0)
                    await inference.finish(deadline)
        finally:
            for runner in runners:
                await runner.cleanup()

    asyncio.run(scenario())
    return found, failures


def check_scores(found: dict[Key, Scores], samples: list[Finished]) -> None:
    assert {k: s.score for k, s in found.items()} == {s.key: float(len(s)) for s in samples}
    assert all(s.values is not None and len(s.values) == len(found[s.key].ref_logprobs) for s in found.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("waves", [1, 8])
def test_every_sample_gets_its_own_scores(waves: int) -> None:
    samples = [finished(3 + i % 5, 1 + i % 7, i) for i in range(40)]
    found, failures = run_scoring([FakeScorer(), FakeScorer()], [samples[i::waves] for i in range(waves)])
    check_scores(found, samples)
    assert failures == []


@pytest.mark.parametrize("broken", ["status", "nan"])
def test_a_failing_scorers_batches_go_to_another(broken: str) -> None:
    samples = [finished(4, 1 + i % 3, i) for i in range(30)]
    found, failures = run_scoring([FakeScorer(broken), FakeScorer()], [samples[:15], samples[15:]])
    check_scores(found, samples)
    assert failures
    assert "scorer-0" in failures[0]


@pytest.mark.slow
def test_without_a_working_scorer_the_last_failure_is_named() -> None:
    with pytest.raises(TimeoutError, match="last failure: scorer-0: status 500: out of memory"):
        run_scoring([FakeScorer("status")], [[finished(2, 2)]], deadline=0.5)


def score_one(
    fakes: list[FakeScorer], allowed: Callable[[list[Scorer]], list[Scorer]], gone: Callable[[Scorer], bool]
) -> set[Key]:
    """What was scored of one sample that is added once; `allowed` of the scorers may take it."""
    found: set[Key] = set()

    async def scenario() -> None:
        runners, servers = await serve(*fakes)
        try:
            async with (
                aiohttp.ClientSession() as session,
                Inference(
                    ScorerPool(session, lambda: allowed(servers), is_gone=gone),
                    ["reward"],
                    lambda scores: found.update(s.key for s in scores),
                ) as inference,
            ):
                inference.add([finished(2, 2)])
                await inference.finish(20.0)
        finally:
            for runner in runners:
                await runner.shutdown()

    asyncio.run(scenario())
    return found


@pytest.mark.slow
def test_a_batch_that_fails_after_all_were_handed_out_is_scored_again() -> None:
    """A scorer is killed and started again while the queue is empty: nobody adds samples or wakes the hand-out."""

    class Fails(FakeScorer):
        async def handle(self, request: web.Request) -> web.Response:
            if self.calls == 0:
                await asyncio.sleep(0)  # the hand-out has gone to sleep by now
                self.broken = "status"
            answer = await super().handle(request)
            self.broken = None
            return answer

    scorer = Fails()
    assert score_one([scorer], lambda servers: servers, lambda _: False) == {finished(2, 2).key}
    assert scorer.calls == 2


@pytest.mark.slow
def test_the_batch_of_a_scorer_that_went_silent_goes_to_another() -> None:
    """Its connection stays open, as that of a node without power or of a process that is frozen."""
    silent: set[str] = set()

    class Frozen(FakeScorer):
        async def handle(self, request: web.Request) -> web.Response:
            silent.add("scorer-0")
            await asyncio.sleep(3600)
            raise AssertionError

    def allowed(servers: list[Scorer]) -> list[Scorer]:
        """The other one has come only when the first one fell silent."""
        return servers[1:] if silent else servers[:1]

    scored = score_one([Frozen(), FakeScorer()], allowed, lambda scorer: scorer.name in silent)
    assert scored == {finished(2, 2).key}
    assert silent == {"scorer-0"}


def test_what_the_store_says_ends_inference() -> None:
    with pytest.raises(StoreError, match="disk is full"):
        run_scoring([FakeScorer()], [[finished(2, 2)]], refuse="disk is full")


def test_a_callback_that_fails_ends_inference() -> None:
    async def scenario() -> None:
        def broken() -> list[Scorer]:
            raise StoreError("no fleet")

        async with (
            aiohttp.ClientSession() as session,
            Inference(ScorerPool(session, broken), ["reward"], lambda scores: None) as inference,
        ):
            inference.add([finished(2, 2)])
            await inference.finish(20.0)

    with pytest.raises(StoreError, match="no fleet"):
        asyncio.run(scenario())


def test_nothing_to_score_is_done_at_once() -> None:
    assert run_scoring([], [[]]) == ({}, [])


def arrays() -> dict[str, Any]:
    return {
        "tokens": np.zeros((2, 5), np.int32),
        "response_lengths": np.array([2, 1], np.int32),
        "rollout_logprobs": np.array([[-1.0, -2.0], [-1.0, 99.0]], np.float32),
        "ref_logprobs": np.array([[-1.5, -2.5], [-0.5, -99.0]], np.float32),
        "scores": np.array([1.0, 2.0], np.float32),
    }


def test_kl_sums_over_the_response_only() -> None:
    assert kl_per_sample(arrays()).tolist() == [1.0, -0.5]


def test_scores_and_advantages_can_be_replaced_but_not_reshaped() -> None:
    experience = Experience(1, ["a", "b"], ["x", "y"], arrays())
    experience.scores = [3.0, 4.0]
    assert experience.arrays["scores"].tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match=r"scores must have shape \(2,\)"):
        experience.scores = [1.0]
    with pytest.raises(ValueError, match=r"advantages must have shape \(2, 2\), not \(2, 3\)"):
        experience.set_advantages(np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32))


def test_experience_files_are_forgotten_only_up_to_the_checkpoint(tmp_path: Path) -> None:
    files = ExperienceFiles(tmp_path)
    for iteration in (1, 2, 3):
        files.write(iteration, arrays())
    files.forget_through(2)
    with pytest.raises(KeyError):
        files.read(2)
    assert unpack(files.read(3))["scores"].tolist() == [1.0, 2.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50))
def test_interval_is_196_standard_errors(values: list[float]) -> None:
    expected = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    assert mean_ci95(values)["ci95"] == pytest.approx(expected, abs=1e-9)


def test_summary_nests_dotted_facts(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", build({"sft.loss_before": 3.0, "sft.loss_after": 1.0, "x": 2}))
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "sft": {"loss_before": 3.0, "loss_after": 1.0},
        "x": 2,
    }


def test_rollouts_and_scorers_are_numbered_apart() -> None:
    targets = [
        Target("v100-1", "rollout", "u", "i", world=2),
        Target("v100-0", "rollout", "u", "i"),
        Target("v100-0-scorer", "scorer", "u", "i"),
    ]
    assert [(r.name, r.models, r.rank_offset, r.world) for r in receivers_of(targets)] == [
        ("v100-0", ["actor"], 1, 1),
        ("v100-0-scorer", ["critic"], 1, 1),
        ("v100-1", ["actor"], 2, 2),
    ]
