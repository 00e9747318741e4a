"""The scorer through its HTTP routes, with tiny random Llamas on the CPU; its numbers against the trainer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from aiohttp.test_utils import TestClient

from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.wire import pack
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from dovetail.rollout.scoring.scorer_app import ScorerService
from helpers.scorers import (
    VOCABULARY,
    FakeReceiver,
    exported,
    load,
    ref,
    samples,
    score,
    trainers_numbers,
    with_client,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRef]:
    return exported(tmp_path_factory)


@pytest.mark.parametrize(("max_tokens", "temperature"), [(8192, 1.0), (1, 1.0), (60, 0.7)])
def test_results_equal_the_trainers(folders: dict[str, ModelRef], max_tokens: int, temperature: float) -> None:
    arrays = samples()
    expected = trainers_numbers(folders, arrays, temperature)

    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        await load(client, folders)
        got = await score(client, arrays, "reference,reward,critic", temperature=str(temperature))
        assert set(got) == set(expected)
        for name, array in expected.items():
            assert got[name].dtype == np.float32
            np.testing.assert_allclose(got[name], array, atol=1e-5, rtol=0)
        assert np.abs(got["values"]).max() > 0.01
        only = await score(client, arrays, "reward")
        assert set(only) == {"scores"}

    with_client(body, max_tokens)


@pytest.mark.slow
def test_company_changes_no_bit_of_a_samples_scores(folders: dict[str, ModelRef]) -> None:
    """Inter-stage fusion scores samples in whatever company they finish: a run must not depend on it."""
    g = np.random.default_rng(5)
    prompts, responses = g.integers(1, 40, 24).astype(np.int32), g.integers(0, 80, 24).astype(np.int32)
    prompts[0], responses[0] = 48, 80  # all of the model's positions
    tokens = g.integers(0, VOCABULARY, (24, 128)).astype(np.int32)

    def rows(chosen: list[int]) -> SamplesToScore:
        arrays = {"tokens": tokens, "prompt_lengths": prompts, "response_lengths": responses}
        return SamplesToScore.read({name: array[chosen] for name, array in arrays.items()})

    scorer = scoring.ModelScorer()
    scorer.load(folders)
    together = scorer.score(scoring.MODELS, rows(list(range(24))))
    for size in (1, 2, 5):
        order = g.permutation(24).tolist()
        for batch in (order[i : i + size] for i in range(0, 24, size)):
            apart = scorer.score(scoring.MODELS, rows(batch))
            assert together["scores"][batch].tolist() == apart["scores"].tolist()
            for name in ("ref_logprobs", "values"):
                width = apart[name].shape[1]
                assert together[name][batch][:, :width].tolist() == apart[name].tolist()


def test_load_replaces_the_set_and_keeps_what_is_there(folders: dict[str, ModelRef]) -> None:
    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        await load(client, {"reward": folders["reward"], "critic": folders["critic"]})
        kept = service.scorer.require("critic")
        await load(client, {"critic": folders["critic"], "reference": folders["reference"]})
        assert service.scorer.require("critic") is kept
        info = await (await client.get("/v1/info")).json()
        assert set(info["models"]) == {"critic", "reference"}
        response = await client.post("/v1/score", params={"want": "reward"}, data=pack(samples()))
        assert response.status == 409
        assert "reward is not loaded" in await response.text()
        # Another folder's weights under the same name do replace it.
        await load(client, {"critic": folders["reward"]})
        assert service.scorer.require("critic") is not kept

    with_client(body)


def test_bad_requests_get_one_sentence(folders: dict[str, ModelRef], tmp_path: Path) -> None:
    good = samples()
    outside = {**good, "tokens": good["tokens"].copy()}
    outside["tokens"][0, 0] = VOCABULARY
    long = {**good, "response_lengths": good["response_lengths"] + 100}
    cases: list[tuple[dict[str, str], bytes, str]] = [
        ({}, pack(good), "say what is wanted"),
        ({"want": "reference,wisdom"}, pack(good), "wisdom"),
        ({"want": "reference", "temperature": "hot"}, pack(good), "hot"),
        ({"want": "reference", "temperature": "0"}, pack(good), "temperature"),
        ({"want": "reference"}, b"not safetensors", "safetensors"),
        ({"want": "reference"}, pack({k: good[k] for k in ("tokens", "prompt_lengths")}), "response_lengths"),
        ({"want": "reference"}, pack({**good, "prompt_lengths": 0 * good["prompt_lengths"]}), "at least 1"),
        ({"want": "reference"}, pack({**good, "tokens": good["tokens"].astype(np.float32)}), "integer"),
        ({"want": "reference"}, pack(long), "exceed the width"),
        ({"want": "reference"}, pack(outside), "vocabulary of 97"),
    ]

    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        await load(client, {"reference": folders["reference"]})
        for query, data, message in cases:
            response = await client.post("/v1/score", params=query, data=data)
            text = await response.text()
            assert response.status == 400, text
            assert message in text
            assert "\n" not in text
        for models, message in (
            ({"critic": ref("lm", 0)}, "needs head 'value'"),
            ({"wisdom": ref("lm", 0)}, "wisdom"),
            ({"reward": ModelRef(head="value", path=str(tmp_path / "none"))}, "no such model folder"),
        ):
            response = await client.post("/v1/load", json={"models": {n: r.model_dump() for n, r in models.items()}})
            text = await response.text()
            assert response.status == 400, text
            assert message in text
        response = await client.post("/v1/load", json={"model": {}})
        assert response.status == 400
        assert "models" in await response.text()

    with_client(body)


def test_every_route_but_metrics_and_health_asks_for_the_token() -> None:
    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            for method, path in (
                ("GET", "/v1/info"),
                ("POST", "/v1/load"),
                ("POST", "/v1/score"),
                ("POST", "/v1/weights"),
                ("GET", "/no/such/route"),
            ):
                assert (await client.request(method, path, headers=headers)).status == 401
            assert (await client.get("/healthz", headers=headers)).status == 200
            text = await (await client.get("/metrics", headers=headers)).text()
            assert 'dovetail_scorer_requests_total{route="/v1/score",status="401"}' in text

    with_client(body)


def test_an_empty_request_has_empty_answers(folders: dict[str, ModelRef]) -> None:
    scorer = scoring.ModelScorer()
    scorer.load(folders)
    none = SamplesToScore(np.zeros((0, 4), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    result = scorer.score(scoring.MODELS, none)
    assert {k: v.shape for k, v in result.items()} == {"ref_logprobs": (0, 0), "scores": (0,), "values": (0, 0)}


def test_a_reward_model_from_elsewhere_is_read_where_transformers_reads_it(tmp_path: Path) -> None:
    """Its `pad_token_id` is often the end token: the score is that of the token before it."""
    end, g = 7, np.random.default_rng(2)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        num_labels=1,
        pad_token_id=end,
    )
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokens = g.integers(8, 64, (6, 2 * RESPONSE_BLOCK + 9)).astype(np.int32)
    prompts = np.array([5, 5, 4, 3, 6, 2], np.int32)
    lengths = np.array([9, 2 * RESPONSE_BLOCK + 9, 12, 7, 8, RESPONSE_BLOCK + 5], np.int32)
    for row, ends in enumerate([1, 1, 0, 4, 6, 4]):  # of rows 3 and 4 the response has nothing else
        tokens[row, lengths[row] - ends : lengths[row]] = end
    arrays = {"tokens": tokens, "prompt_lengths": prompts, "response_lengths": lengths - prompts}

    def unfinished(most: int) -> SamplesToScore:
        return SamplesToScore.read({**arrays, "response_lengths": np.minimum(lengths - prompts, most)})

    for own in (False, True):
        if own:
            (tmp_path / "dovetail.json").write_text("{}")
        scorer = scoring.ModelScorer()
        scorer.room = 10**6
        scorer.load({"reward": ModelRef(head="value", path=str(tmp_path))})
        model.config.pad_token_id = None if own else end
        with torch.no_grad():
            wanted = [
                model(torch.from_numpy(row[:length].astype(np.int64))[None]).logits.item()
                for row, length in zip(tokens, lengths, strict=True)
            ]
        for parts in ((), (RESPONSE_BLOCK + 1, 2 * RESPONSE_BLOCK + 1)):
            for most in parts:
                scorer.begin(["reward"], unfinished(most))
            got = scorer.score(["reward"], SamplesToScore.read(arrays))["scores"]
            np.testing.assert_allclose(got, wanted, atol=1e-5)
