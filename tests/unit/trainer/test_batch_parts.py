"""A rank has its own rows of a PPO batch, and computes with them what it computes with the whole batch."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.training_types import PPO
from dovetail.protocol.wire import Arrays, Document, pack, unpack
from dovetail.trainer.algorithms.advantages import Statistics
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.steps.experience_batch import PPOSamples, counted_samples, targets
from dovetail.trainer.steps.ppo_step import _cuts, _part, _shared_goals
from dovetail.trainer.steps.step_context import Context
from helpers.fake_coordinator import as_stored
from helpers.trainer_ranks import ppo_batch

METHODS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo without whitening": {"whitenAdvantages": False},
    "vapo": {"whitenAdvantages": False, "lamAlpha": 0.05, "lamValue": 1.0},
    "grpo": {"advantage": "grpo", "samplesPerPrompt": 2},
    "grpo, KL in the reward": {"advantage": "grpo", "samplesPerPrompt": 2, "kl": {"in": "Reward"}},
    "dr. grpo": {"advantage": "grpo", "samplesPerPrompt": 2, "normalizeStd": False},
    "rewards of steps": {"advantage": "grpo", "samplesPerPrompt": 2, "dropEqualGroups": True},
    "rloo": {"advantage": "rloo", "samplesPerPrompt": 2},
    "whitened rewards": {"advantage": "rloo", "samplesPerPrompt": 2, "whitenRewards": True},
    "reinforce++": {"advantage": "reinforce++"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline", "samplesPerPrompt": 2},
    "distillation": {"advantage": "distillation"},
}


def whole_batch(steps: bool) -> Arrays:
    arrays = unpack(as_stored(ppo_batch(3)))
    if steps:
        lengths = arrays["response_lengths"]
        inside = np.arange(arrays["values"].shape[1])[None, :] < lengths[:, None]
        random = np.random.default_rng(0)
        arrays["step_ends"] = (inside & (random.random(inside.shape) < 0.4)).astype(np.uint8)
        arrays["step_rewards"] = (arrays["step_ends"] * random.standard_normal(inside.shape)).astype(np.float32)
    return arrays


def context_of(rank: int, dp: int, ppo: PPO) -> Context:
    model = SimpleNamespace(dp_size=dp, dp_rank=rank, packs=True)
    spec = SimpleNamespace(ppo=ppo, seed=7, stages=[], models=SimpleNamespace(reward=SimpleNamespace(calls=[])))
    found: Any = SimpleNamespace(
        spec=spec,
        groups=SimpleNamespace(rank=rank),
        engine=SimpleNamespace(models={"actor": model}),
        advantages=None,
        model=lambda _: model,
    )
    return found


def own(context: Context, lengths: list[int]) -> tuple[list[int], Any]:
    step: Any = SimpleNamespace(step=1, micro_batch_tokens=None)
    cuts = _cuts(context, step, lengths, ["actor"])
    rows = sorted({row for cut in cuts for part in cut.work["actor"] for row in part})
    return rows, _part(context, rows)


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_computes_the_same_bits_from_its_part(method: str, kl: float) -> None:
    sizes = {"miniBatchSize": 8, "microBatchSize": 2, "globalBatchSize": 16, "epochs": 1}
    config = PPO.model_validate({**METHODS[method], **sizes, "kl": {"coef": 0.3, **METHODS[method].get("kl", {})}})
    arrays, trained = whole_batch("steps" in method), list[int]()
    document = Document(pack(arrays))
    samples = PPOSamples.read(arrays, config)
    recomputed = samples.rollout_logprobs * 1.01
    found_by_first = Statistics()
    expected = targets(samples, config, kl, recomputed, statistics=found_by_first)
    sent_to_first, less = 0, 0
    for rank in range(4):
        context = context_of(rank, 4, config)
        rows, part = own(context, samples.sequences.lengths.tolist())
        head, ranges = document.part(part)
        sent = head + document.read(ranges)
        sent_to_first = sent_to_first or len(sent)
        less += len(sent) < (document.size if rank == 0 else sent_to_first)
        mine = PPOSamples.read(unpack(sent), config)
        for name in ("tokens", "lengths"):
            assert torch.equal(getattr(mine.sequences, name)[rows], getattr(samples.sequences, name)[rows])
        given = None if rank == 0 else json.loads(json.dumps(found_by_first.found))
        own_recomputed = torch.where(mine.rollout_logprobs != 0, recomputed, 0.0)
        goals = targets(mine, config, kl, own_recomputed, statistics=Statistics(given))
        pairs = [
            (goals.advantages, expected.advantages),
            (goals.returns, expected.returns),
            (goals.old_values, expected.old_values),
            (goals.weights, expected.weights),
            (mine.rollout_logprobs, samples.rollout_logprobs),
            (mine.ref_logprobs, samples.ref_logprobs),
            (mine.mask, samples.mask),
            (counted_samples(mine, config), counted_samples(samples, config)),
        ]
        for found, wanted in pairs:
            assert (found is None) == (wanted is None)
            assert found is None or wanted is None or torch.equal(found[rows], wanted[rows])
        if rank == 0:  # it reports
            assert goals.metrics == expected.metrics
        trained += rows
    assert sorted(trained) == list(range(16)), "each row belongs to one rank"
    assert less == 4


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(2, 300), min_size=16, max_size=16),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 900]),
    st.integers(1, 3),
)
def test_the_rows_of_the_ranks_are_a_partition_of_the_samples(
    lengths: list[int], dp: int, most: int | None, epochs: int
) -> None:
    """In every mini-batch, also when the group is formed anew with another number of ranks."""
    config = PPO.model_validate({"miniBatchSize": 8, "microBatchSize": 2, "globalBatchSize": 16, "epochs": epochs})
    step: Any = SimpleNamespace(step=3, micro_batch_tokens=most, kl_coef=0.1)
    of_ranks = [_cuts(context_of(rank, dp, config), step, lengths, ["actor"]) for rank in range(dp)]
    for cuts in zip(*of_ranks, strict=True):
        assert all(cut.rows == cuts[0].rows for cut in cuts)
        rows = [row for cut in cuts for part in cut.work["actor"] for row in part]
        assert sorted(rows) == sorted(cuts[0].rows)
    assert sorted(row for cut in of_ranks[0] for row in cut.rows) == sorted(list(range(16)) * epochs)


class OneMessage:
    """The groups of several ranks, one after the other: what rank 0 tells."""

    def __init__(self) -> None:
        self.told = ""

    def context(self, rank: int) -> Any:
        def broadcast_json(value: Any) -> Any:
            if rank == 0:
                self.told = json.dumps(value)
            return json.loads(self.told)

        return SimpleNamespace(groups=SimpleNamespace(rank=rank, broadcast_json=broadcast_json), advantages=None)


def test_ranks_have_the_goals_or_the_refusal_of_rank_0() -> None:
    config = PPO.model_validate({"miniBatchSize": 8, "microBatchSize": 2, "globalBatchSize": 16})
    samples = PPOSamples.read(whole_batch(False), config)
    zeros = torch.zeros_like(samples.rollout_logprobs)
    few = replace(samples, rollout_logprobs=zeros.clone(), values=zeros.clone(), ref_logprobs=zeros.clone())
    for name in ("rollout_logprobs", "values", "ref_logprobs"):
        getattr(few, name)[3] = getattr(samples, name)[3]

    def make(samples: PPOSamples) -> Any:
        return lambda statistics: targets(samples, config, 0.1, None, statistics=statistics)

    ranks = OneMessage()
    first = _shared_goals(ranks.context(0), make(samples), None)
    second = _shared_goals(ranks.context(1), make(few), None)
    assert torch.equal(first.advantages[3], second.advantages[3])
    assert first.advantages[3].any()

    def refuse(_: Any) -> Any:
        raise BadCommand("these returns are no numbers")

    for rank in (0, 1):
        with pytest.raises(BadCommand, match="no numbers"):
            _shared_goals(ranks.context(rank), refuse if rank == 0 else make(few), None)


def test_rows_that_cannot_be_shared_are_refused_before_they_are_fetched() -> None:
    config = PPO.model_validate({"miniBatchSize": 8, "microBatchSize": 2, "globalBatchSize": 16})
    with pytest.raises(BadCommand, match="miniBatchSize"):
        own(context_of(0, 2, config), [5] * 15)
