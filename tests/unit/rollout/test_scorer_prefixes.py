"""Samples that are scored in parts while they are generated get the bits that they get when they are scored whole."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.wire import Arrays
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from helpers.family_models import FAMILIES, ref
from helpers.scorers import load, score, with_client

B = RESPONSE_BLOCK
VOCABULARY = 64
# Prompt and response tokens: of a sample that ends just before, at and after a block, and of others.
SIZES = ((7, 3 * B + 9), (20, 2 * B), (1, B + 1), (33, 2 * B - 1), (20, 5))
WITH_EXPERTS = [name for name in FAMILIES if MODEL_FAMILIES[name].experts is not None]


def refs(family: str) -> dict[str, ModelRef]:
    more: dict[str, Any] = {"max_position_embeddings": 512}
    if family == "gemma3_text":
        more["sliding_window"] = 50
    return {name: ref(family, head, **more) for name, head in scoring.HEADS.items()}


def scorer(family: str = "llama", room: int = 10**6, **how: Any) -> scoring.ModelScorer:
    """With weights that make a difference."""
    made = scoring.ModelScorer(**how)
    made.room = room
    made.load(refs(family))
    for seed, name in enumerate(scoring.MODELS):
        generator = torch.Generator().manual_seed(seed)
        for parameter in dict(sorted(made.require(name).named_parameters())).values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return made


def drawn(seed: int = 0, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts and responses."""
    g = np.random.default_rng(seed)
    return [(g.integers(1, VOCABULARY, p), g.integers(1, VOCABULARY, r)) for p, r in sizes]


def arrays(samples: list[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    tokens = np.zeros((len(samples), max(len(p) + len(r) for p, r in samples)), np.int32)
    for row, (prompt, response) in zip(tokens, samples, strict=True):
        row[: len(prompt) + len(response)] = np.concatenate([prompt, response])
    return {
        "tokens": tokens,
        "prompt_lengths": np.array([len(p) for p, _ in samples], np.int32),
        "response_lengths": np.array([len(r) for _, r in samples], np.int32),
    }


def to_score(samples: list[tuple[np.ndarray, np.ndarray]]) -> SamplesToScore:
    return SamplesToScore.read(arrays(samples))


def cut(samples: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(prompt, response[:most]) for prompt, response in samples]


def assert_same_bits(found: Arrays, expected: Arrays, row: int | None = None) -> None:
    for name, array in expected.items():
        mine = array if row is None else array[row : row + 1]
        if mine.ndim == 2:
            mine = mine[:, : found[name].shape[1]]
        np.testing.assert_array_equal(found[name], mine, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_give_the_bits_of_the_whole(family: str, stages: int) -> None:
    made = scorer(family, devices=["cpu"] * stages)
    samples = drawn()
    whole = made.score(scoring.MODELS, to_score(samples), 0.7)
    assert all(np.abs(array).max() > 0 for array in whole.values())
    # However often it comes, with whom, and up to where.
    for step in (B + 1, 2 * B + 17):
        for most in range(step, 4 * B, step):
            made.begin(scoring.MODELS, to_score(cut(samples, most)), 0.7)
        assert_same_bits(made.score(scoring.MODELS, to_score(samples), 0.7), whole)
    for row, sample in enumerate(samples):
        held = made.begin(scoring.MODELS, to_score(cut([sample], 2 * B + 1)), 0.7)
        assert held == [min(2, max(0, len(sample[1]) - 1) // B) * B]
        alone = made.score(scoring.MODELS, to_score([sample]), 0.7)
        assert_same_bits(alone, whole, row)


def test_what_was_seen_is_not_computed_again() -> None:
    work: Counter[str] = Counter()
    made = scorer(progress=lambda model, tokens: work.update({model: tokens}))
    samples = drawn(sizes=((10, 3 * B + 5), (12, B + 5)))
    assert made.begin(scoring.MODELS, to_score(cut(samples, 2 * B + 30))) == [2 * B, B]
    assert work == dict.fromkeys(scoring.MODELS, 22 + 3 * B)
    work.clear()
    assert made.begin(scoring.MODELS, to_score(cut(samples, 2 * B + 31))) == [2 * B, B]
    assert not work
    made.score(scoring.MODELS, to_score(samples))
    assert work == dict.fromkeys(scoring.MODELS, B + 5 + 5)


@pytest.mark.parametrize("lost", ["weights", "evicted", "left", "failed", "other tokens", "temperature"])
def test_a_lost_prefix_costs_time_and_no_bit(lost: str) -> None:
    samples, others = drawn(), drawn(seed=1)
    made = scorer(room=1000)
    expected = made.score(scoring.MODELS, to_score(samples), 0.7)
    made.begin(scoring.MODELS, to_score(cut(samples, B + 5)), 1.0 if lost == "temperature" else 0.7)
    if lost == "weights":
        critic = dict(made.require("critic").named_parameters())
        made.apply_weights(made.stage_weights((n, 2 * p.data) for n, p in critic.items()), 2)
        fresh = scorer()
        fresh.apply_weights(fresh.stage_weights((n, 2 * p.data) for n, p in critic.items()), 2)
        for name, parameter in fresh.require("critic").named_parameters():
            parameter.data.copy_(critic[name].data)
        expected["values"] = fresh.score(["critic"], to_score(samples))["values"]
    elif lost == "evicted":
        assert sum(held > 0 for held in made.begin(scoring.MODELS, to_score(cut(others, 3 * B + 2)), 0.7)) == 4
    elif lost == "left":
        made.leave()
    elif lost == "failed":
        stage = made.require("critic").stages[0]
        handle = stage.body.layers["2"].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.begin(scoring.MODELS, to_score(cut(samples, 2 * B + 5)), 0.7)
        handle.remove()
    elif lost == "other tokens":
        samples = [
            (prompt, np.concatenate([r[:9], o[:1], r[10:]]))
            for (prompt, r), (_, o) in zip(samples, others, strict=True)
        ]
        expected = scorer().score(scoring.MODELS, to_score(samples), 0.7)
    assert_same_bits(made.score(scoring.MODELS, to_score(samples), 0.7), expected)


def test_memory_is_bounded_and_freed_when_a_sample_is_scored() -> None:
    made = scorer(room=3 * B)
    samples = drawn(sizes=((10, 2 * B + 5), (12, 2 * B + 5), (500, B + 1)))
    # The second one does not fit beside the first, nor the third at all.
    assert made.begin(scoring.MODELS, to_score(samples)) == [2 * B, 0, 0]
    assert made._prefixes.tokens == 10 + 2 * B
    # The new one takes the place of the older one.
    assert made.begin(scoring.MODELS, to_score(samples[1:])) == [2 * B, 0]
    assert made._prefixes.tokens == 12 + 2 * B
    made.score(["critic"], to_score(samples))
    assert made._prefixes.tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_company_changes_no_bit_of_the_scores_of_models_with_experts(family: str) -> None:
    """How many tokens an expert gets depends on the company."""
    made, samples = scorer(family), drawn(sizes=SIZES * 3)
    together = made.score(scoring.MODELS, to_score(samples))
    for size in (1, 2, 4):
        for first in range(0, len(samples), size):
            apart = made.score(scoring.MODELS, to_score(samples[first : first + size]))
            for name, found in apart.items():
                mine = together[name][first : first + size]
                assert found.tolist() == (mine if mine.ndim == 1 else mine[:, : found.shape[1]]).tolist(), name


def test_parts_over_http() -> None:
    models, samples = refs("llama"), arrays(drawn())
    plain = scoring.ModelScorer()
    plain.load(models)
    expected = plain.score(scoring.MODELS, SamplesToScore.read(samples))

    async def body(client: Any, service: Any, receiver: Any) -> None:
        service.scorer._prefixes.room = 1000
        await load(client, models)
        from dovetail.protocol.wire import pack

        part = arrays(cut(drawn(), 2 * B + 1))
        answer = await client.post("/v1/begin", params={"want": "reference,critic"}, data=pack(part))
        assert await answer.json() == {"held": [2 * B, B, B, B, 0]}
        assert_same_bits(await score(client, samples, "reference,reward,critic"), expected)
        wrong = await client.post("/v1/begin", params={"want": "values"}, data=pack(part))
        assert (wrong.status, await wrong.text()) == (
            400,
            "cannot score 'values'; want any of reference, reward, critic",
        )

    with_client(body)
