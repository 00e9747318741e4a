"""Samples that grow while real scorers look at them, one of which dies: the bits of samples that are scored whole."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from dovetail.coordinator.samples.scoring import Finished, Inference, Scorer, Scores
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Key
from dovetail.manifest.types import ScratchModel
from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.messages import ModelRef, Span
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from dovetail.rollout.scoring.scorer_app import ScorerService, make_app
from helpers.coordinated import ScorerPool
from helpers.scorers import CONFIG, TOKEN, VOCABULARY

ROOM = 600
MODELS = {
    name: ModelRef(head=head, scratch=ScratchModel(config=CONFIG | {"max_position_embeddings": 512}), seed=3)  # type: ignore[arg-type]
    for name, head in scoring.HEADS.items()
}


def scorer() -> scoring.ModelScorer:
    made = scoring.ModelScorer()
    made.room = ROOM
    made.load(MODELS)
    for name in ("reward", "critic"):
        dict(made.require(name).named_parameters())["score.weight"].data.fill_(0.1)
    return made


def responses(rng: np.random.Generator) -> dict[Key, Finished]:
    found = {}
    for number in range(6):
        key = Key(1, number // 2, number % 2)
        prompt = np.full(9, 1 + number // 2, np.int32)
        response = rng.integers(0, VOCABULARY, int(rng.integers(1, 4 * RESPONSE_BLOCK)))
        found[key] = Finished(key, prompt, response.astype(np.int32))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_scores_do_not_depend_on_when_scorers_looked(dies: bool) -> None:
    rng = np.random.default_rng(dies)
    samples = responses(rng)
    found: dict[Key, Scores] = {}
    spans: list[Span] = []

    async def main() -> None:
        services = [ScorerService(scorer(), lambda event, **fields: None) for _ in range(2)]
        servers = [TestServer(make_app(service, TOKEN)) for service in services]
        for server in servers:
            await server.start_server()
        alive = [Scorer(f"s{i}", str(server.make_url("")).rstrip("/"), "1", ROOM) for i, server in enumerate(servers)]
        headers = {"Authorization": f"Bearer {TOKEN}"}

        def lose(lost: Scorer, reason: str) -> None:
            if lost in alive:
                alive.remove(lost)

        async with (
            aiohttp.ClientSession(headers=headers) as session,
            Inference(
                ScorerPool(session, lambda: list(alive), lose, count=3),
                list(scoring.MODELS),
                lambda scores: found.update((s.key, s) for s in scores),
                spans.append,
            ) as inference,
        ):
            grown = dict.fromkeys(samples, 0)
            while left := [key for key, n in grown.items() if n < len(samples[key].response)]:
                for key in left:
                    grown[key] = min(grown[key] + int(rng.integers(1, 40)), len(samples[key].response))
                growing = [
                    Growing(key, samples[key].prompt.tolist(), samples[key].response[:n].tolist())
                    for key, n in grown.items()
                    if n < len(samples[key].response)
                ]
                inference.add([samples[key] for key in left if grown[key] == len(samples[key].response)])
                inference.follow(len(growing), lambda now=growing: now)  # type: ignore[misc]
                inference.poke()
                await asyncio.sleep(0.03)
                looks = [span for span in spans if "unfinished" in span.args]
                if dies and len(looks) == 3 and len(alive) == 2:
                    # The one that has looked last.
                    number = int(looks[-1].process[1:])
                    await servers[number].close()
            await inference.finish(60)
        for server, service in zip(servers, services, strict=True):
            await server.close()
            service.close()

    asyncio.run(main())
    assert any("unfinished" in span.args for span in spans)
    plain = scorer()
    assert found.keys() == samples.keys()
    for key, sample in samples.items():
        whole = np.concatenate([sample.prompt, sample.response])[None].astype(np.int64)
        alone = SamplesToScore(whole, np.array([len(sample.prompt)]), np.array([len(sample.response)]))
        expected = plain.score(scoring.MODELS, alone)
        np.testing.assert_array_equal(found[key].ref_logprobs, expected["ref_logprobs"][0])
        np.testing.assert_array_equal(found[key].values, expected["values"][0])
        assert found[key].score == float(expected["scores"][0])
