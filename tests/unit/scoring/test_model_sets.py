"""Models on unlike scorers: each sample meets every model once, and comes back as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from dovetail.coordinator.samples.model_sets import InferenceOfSets, ModelSet, model_sets
from dovetail.coordinator.samples.scoring import Finished, Inference, Scorer, Scores
from dovetail.coordinator.store.episodes import BranchPlace, StoredEpisode
from dovetail.coordinator.store.samples import Key
from dovetail.protocol.wire import BRANCH, pack, unpack
from helpers.coordinated import ScorerPool

WANT = ["reference", "reward", "critic"]


@given(st.lists(st.sets(st.sampled_from(WANT)), max_size=6))
def test_sets_part_the_models_and_nobody_holds_half_a_set(holders: list[set[str]]) -> None:
    held = set().union(*holders) if holders else set()
    if held != set(WANT):
        with pytest.raises(ValueError, match="lets no scorer hold the"):
            model_sets(WANT, holders)
        return
    sets = model_sets(WANT, holders)
    assert sorted(model for each in sets for model in each) == sorted(WANT)
    for holder in holders:
        assert all(set(each) <= holder or not set(each) & holder for each in sets)


def test_where_all_hold_all_there_is_one_set() -> None:
    assert model_sets(WANT, [set(WANT)] * 3) == [tuple(WANT)]
    assert model_sets(WANT, [{"reference"}, {"reward", "critic"}]) == [("reference",), ("reward", "critic")]


class Holder:
    """A scorer that holds some of the models; answers are numbers made of the sample's length."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.seen: list[int] = []

    async def handle(self, request: web.Request) -> web.Response:
        want = request.query["want"].split(",")
        if not set(want) <= set(self.models):
            return web.Response(status=409, text=f"{want} are not all loaded")
        arrays = unpack(await request.read())
        lengths = (arrays["prompt_lengths"] + arrays["response_lengths"]).astype(np.float32)
        self.seen += [int(n) for n in lengths]
        full = np.ones((len(lengths), int(arrays["response_lengths"].max())), np.float32)
        answers = {"reference": ("ref_logprobs", -full), "reward": ("scores", lengths), "critic": ("values", full)}
        return web.Response(body=pack(dict(answers[model] for model in want)))


def score(
    holders: list[Holder],
    samples: list[Finished],
    on_scores: Callable[[list[Scores]], None],
    branches: Callable[[Key], Sequence[BranchPlace]] = lambda _: (),
) -> list[str]:
    """Through model sets; the failures."""
    failures: list[str] = []

    async def scenario() -> None:
        runners, servers = [], []
        for index, holder in enumerate(holders):
            app = web.Application()
            app.router.add_post("/v1/score", holder.handle)
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            servers.append(Scorer(f"s{index}", f"http://127.0.0.1:{runners[-1].addresses[0][1]}"))

        async with aiohttp.ClientSession() as session:

            def make(models: ModelSet, collect: Callable[[list[Scores]], None]) -> Inference:
                mine = [s for s, h in zip(servers, holders, strict=True) if set(models) <= set(h.models)]
                return Inference(
                    ScorerPool(session, lambda: mine, lambda _, reason: failures.append(reason)), models, collect
                )

            sets = model_sets(WANT, [h.models for h in holders])
            async with InferenceOfSets(sets, make, on_scores, branches) as inference:
                for wave in (samples[::2], samples[1::2]):
                    inference.add(wave)
                    inference.poke()
                    await asyncio.sleep(0)
                    inference.check()
                await inference.finish(20.0)
        for runner in runners:
            await runner.cleanup()

    asyncio.run(scenario())
    return failures


def samples(count: int) -> list[Finished]:
    return [
        Finished(Key(1, i, 0), np.full(3 + i % 5, 7, np.int32), np.full(1 + i % 7, 8, np.int32)) for i in range(count)
    ]


def test_each_sample_meets_each_model_once_and_is_merged() -> None:
    holders = [Holder("reference"), Holder("reward", "critic"), Holder("reward", "critic")]
    found: dict[Key, Scores] = {}

    def keep(scores: list[Scores]) -> None:
        assert not found.keys() & {s.key for s in scores}
        found.update((s.key, s) for s in scores)

    wanted = samples(40)
    assert score(holders, wanted, keep) == []
    assert {k: s.score for k, s in found.items()} == {s.key: float(len(s)) for s in wanted}
    for sample in wanted:
        scores = found[sample.key]
        assert scores.ref_logprobs is not None
        assert scores.values is not None
        assert len(scores.ref_logprobs) == len(scores.values) == len(sample.response)
    lengths = sorted(len(s) for s in wanted)
    assert sorted(holders[0].seen) == lengths
    assert sorted(holders[1].seen + holders[2].seen) == lengths


def test_the_branches_of_an_episode_are_scored_apart() -> None:
    """Each is a sequence for the scorers. The sample gets what they say of the answers, and 0 in between."""
    holders, found = [Holder("reference"), Holder("reward", "critic")], dict[Key, Scores]()
    learnt = np.array([1, 1, BRANCH, 0, 0, 1, BRANCH, 0, 1, 0, 1, 1], np.uint8)
    episode = StoredEpisode("answered", "", None, [], 3, 0, learnt, False)
    sample = Finished(Key(1, 0, 3), np.arange(5, dtype=np.int32), np.arange(12, dtype=np.int32))
    one = samples(1)[0]

    def keep(scores: list[Scores]) -> None:
        found.update((s.key, s) for s in scores)

    def branches(key: Key) -> list[BranchPlace]:
        return episode.branches if key == sample.key else []

    assert score(holders, [sample, one], keep, branches) == []
    assert sorted(holders[0].seen) == sorted([5 + 2, 4, 6, len(one)])
    assert set(found) == {sample.key, one.key}
    for row in (found[sample.key].ref_logprobs, found[sample.key].values):
        assert row is not None
        assert len(row) == 12
        assert (row != 0).tolist() == [True, True, *[False] * 3, True, *[False] * 2, *[True] * 4]


def test_what_the_store_says_ends_all_sets() -> None:
    def refuse(scores: list[Scores]) -> None:
        raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        score([Holder("reference"), Holder("reward", "critic")], samples(6), refuse)


def test_a_sample_that_no_model_scores_is_done_at_once() -> None:
    """GRPO with a reward function and without a KL penalty: nothing is asked of scorers."""
    told: list[Scores] = []

    async def main() -> None:
        async with InferenceOfSets(
            model_sets([], [set(), set()]), lambda *_: pytest.fail("no set"), told.extend
        ) as inference:
            inference.add([Finished(Key(1, 0, 0), np.array([1], np.int32), np.array([2], np.int32))])
            inference.add([])
            inference.follow(1, list)
            inference.poke()
            inference.check()
            await inference.finish(1.0)

    asyncio.run(main())
    assert [(s.key, s.ref_logprobs, s.values, s.score) for s in told] == [(Key(1, 0, 0), None, None, None)]
