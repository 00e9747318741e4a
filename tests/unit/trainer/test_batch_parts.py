"""A rank has its own rows of a PPO batch, and computes with them what it computes with the whole batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.types import PPO
from dovetail.protocol.wire import Arrays, Document, pack, unpack
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.steps.experience_batch import PPOSamples, counted_samples, targets
from dovetail.trainer.steps.ppo_step import _cuts, _part
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
    model = SimpleNamespace(dp_size=dp, dp_rank=rank)
    spec = SimpleNamespace(ppo=ppo, seed=7, stages=[], models=SimpleNamespace(reward=SimpleNamespace(calls=[])))
    found: Any = SimpleNamespace(
        spec=spec,
        groups=SimpleNamespace(rank=rank),
        engine=SimpleNamespace(models={"actor": model}),
        advantages=None,
        model=lambda _: model,
    )
    return found


def own(context: Context, kl: float, lengths: list[int]) -> tuple[list[int], Any]:
    step: Any = SimpleNamespace(step=1, micro_batch_tokens=None, kl_coef=kl)
    cuts = _cuts(context, step, lengths, ["actor"])
    rows = sorted({row for cut in cuts for part in cut.work["actor"] for row in part})
    return rows, _part(context, step, rows)


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_computes_the_same_bits_from_its_part(method: str, kl: float) -> None:
    sizes = {"miniBatchSize": 8, "microBatchSize": 2, "globalBatchSize": 16, "epochs": 1}
    config = PPO.model_validate({**METHODS[method], **sizes, "kl": {"coef": 0.3, **METHODS[method].get("kl", {})}})
    arrays, trained = whole_batch("steps" in method), list[int]()
    document = Document(pack(arrays))
    samples = PPOSamples.read(arrays, config)
    recomputed = samples.rollout_logprobs * 1.01
    expected = targets(samples, config, kl, recomputed)
    less = 0
    for rank in range(4):
        context = context_of(rank, 4, config)
        rows, part = own(context, kl, samples.sequences.lengths.tolist())
        head, ranges = document.part(part)
        sent = head + document.read(ranges)
        less += len(sent) < document.size
        mine = PPOSamples.read(unpack(sent), config)
        for name in ("tokens", "lengths"):
            assert torch.equal(getattr(mine.sequences, name)[rows], getattr(samples.sequences, name)[rows])
        goals = targets(mine, config, kl, torch.where(mine.rollout_logprobs != 0, recomputed, 0.0))
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


def test_rows_that_cannot_be_shared_are_refused_before_they_are_fetched() -> None:
    config = PPO.model_validate({"miniBatchSize": 8, "microBatchSize": 2, "globalBatchSize": 16})
    with pytest.raises(BadCommand, match="miniBatchSize"):
        own(context_of(0, 2, config), 0.1, [5] * 15)
