"""Micro-batches that are cut by tokens: how rows are dealt, that the gradient stays the same, and what is planned."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.coordinator.schedules.step_commands import StepFacts, ppo_step, supervised_step
from dovetail.coordinator.schedules.stored_schedule import applies
from dovetail.manifest.types import RLHFJob, Stage
from dovetail.planner.make_plan import make_plan
from dovetail.planner.planned_job import PlannedJob
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.packed_batches import micro_batch_count, padded_tokens, pair_lengths, split, split_tokens
from helpers.local_trainer import LocalTrainer
from helpers.manifests import changed
from helpers.trainer_ranks import dpo_batch, job, load_command, ppo_batch, reward_batch, sft_batch

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 4), st.integers(0, 800), st.integers(1, 4))
def test_every_row_is_dealt_once_and_no_micro_batch_is_too_long(
    lengths: list[int], dp: int, room: int, least: int
) -> None:
    lengths, most = lengths * dp, max(lengths) + room
    least = min(least, len(lengths) // dp)
    found = split_tokens(lengths, dp, most, least)
    assert len({len(rank) for rank in found}) == 1, "ranks meet in each micro-batch, so all have as many"
    assert len(found[0]) >= least
    parts = [part for rank in found for part in rank]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in part) <= most for part in parts)
    assert found == split_tokens(list(lengths), dp, most, least)


@given(LENGTHS, st.integers(1, 4), st.integers(0, 800))
def test_there_are_hardly_more_micro_batches_than_the_tokens_need(lengths: list[int], dp: int, room: int) -> None:
    lengths, most = lengths * dp, max(lengths) + room
    count = len(split_tokens(lengths, dp, most)[0])
    # What does not fit into one of the others is more than `most` together with the emptiest.
    assert count <= max(1, -(-2 * sum(lengths) // (dp * most)) + 1)


@given(LENGTHS, st.integers(1, 4), st.integers(0, 800), st.integers(1, 4))
def test_rows_of_similar_lengths_come_together_and_their_padding_counts(
    lengths: list[int], dp: int, room: int, least: int
) -> None:
    lengths, most = lengths * dp, max(lengths) + room
    least = min(least, len(lengths) // dp)
    found = split_tokens(lengths, dp, most, least, packs=False)
    assert {len(rank) for rank in found} == {max(len(found[0]), least)}
    parts = [part for rank in found for part in rank]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(0 < len(part) * max(lengths[row] for row in part) <= most for part in parts)
    spans = sorted((min(lengths[row] for row in part), max(lengths[row] for row in part)) for part in parts)
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_number_of_rows_that_are_not_packed_come_by_similar_lengths(
    dp: int, micro: int, count: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=dp * micro * count, max_size=dp * micro * count))
    found = split(lengths, dp, micro, packs=False)
    assert [[len(part) for part in rank] for rank in found] == [[micro] * count] * dp
    parts = [part for rank in found for part in rank]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    spans = sorted((min(lengths[row] for row in part), max(lengths[row] for row in part)) for part in parts)
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=30), st.integers(0, 800))
def test_pairs_as_rows_do_not_take_more_tokens_than_they_may(pairs: list[tuple[int, int]], room: int) -> None:
    lengths, most = torch.tensor(pairs).T.flatten(), 2 * max(map(max, pairs)) + room
    (parts,) = split_tokens(pair_lengths(lengths, packs=False), 1, most, packs=False)
    assert sorted(pair for part in parts for pair in part) == list(range(len(pairs)))
    assert all(2 * len(part) * max(max(pairs[pair]) for pair in part) <= most for part in parts)
    assert pair_lengths(lengths, packs=True) == [sum(pair) for pair in pairs]


def test_micro_batches_have_nearly_as_many_tokens() -> None:
    lengths = [37, 512, 64, 80, 300, 200, 150, 90, 33, 470, 260, 140, 71, 180, 95, 402]
    found = split_tokens(lengths, 2, 800)
    sums = [[sum(lengths[row] for row in part) for part in rank] for rank in found]
    assert len(found[0]) == 2  # eight micro-batches of two rows before
    assert max(map(max, sums)) <= 1.05 * min(map(min, sums))


@given(LENGTHS, st.integers(1, 4), st.integers(0, 800))
def test_rows_that_ranks_cannot_share_are_made_up(lengths: list[int], dp: int, room: int) -> None:
    found = padded_tokens(lengths, dp, max(lengths) + room)
    assert len({len(rank) for rank in found}) == 1
    real = [row for rank in found for part in rank for row, w in zip(part.rows, part.weights, strict=True) if w]
    assert sorted(real) == list(range(len(lengths)))


def test_one_count_serves_all_mini_batches() -> None:
    long, short = [400, 300, 390, 380], [10, 20, 30, 40]
    assert micro_batch_count([long, short], 2, 400) == 2
    assert [len(rank) for rank in split_tokens(short, 2, 400, 2)] == [2, 2]


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(BadCommand, match="a sequence of 9 tokens does not fit into a micro-batch of 8"):
        split_tokens([9, 1], 1, 8)
    with pytest.raises(BadCommand, match="3 sequences cannot be shared evenly by 2"):
        split_tokens([1, 1, 1], 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "models", "batch"),
    [
        (Stage.SFT, ["actor"], sft_batch(1)),
        (Stage.REWARD, ["reward"], reward_batch(1)),
        (Stage.DPO, ["actor"], dpo_batch(1)),
        (Stage.PPO, ["actor", "critic"], ppo_batch(1)),
    ],
)
def test_the_gradient_is_that_of_one_large_batch(stage: Stage, models: list[str], batch: bytes) -> None:
    def metrics(micro_batches: int, **fields: Any) -> dict[str, float]:
        with LocalTrainer(job(**{stage.value: {"microBatchSize": 8}})) as trainer:
            trainer.metrics(load_command(stage))
            return trainer.metrics(trainer.step(stage, 1, batch, models, micro_batches, **fields))

    whole, cut = metrics(1), metrics(8, micro_batch_tokens=60)
    assert cut.keys() == whole.keys()
    losses = [name for name in whole if name.endswith(("loss", "grad_norm", "kl", "entropy", "margin"))]
    assert len(losses) >= 2
    for name in losses:
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_a_schedule_of_several_mini_batches_is_refused() -> None:
    with LocalTrainer(job()) as trainer:
        trainer.metrics(load_command(Stage.PPO))
        step = trainer.step(Stage.PPO, 1, ppo_batch(1), ["actor", "critic"], 16, micro_batch_tokens=60, mini_batches=2)
        assert "cut by tokens" in str(trainer.execute(step).error)


# ---------------------------------------------------------------- plans and steps


def spec_of(**changes: Any) -> Any:
    return RLHFJob.model_validate(changed(**changes)).spec


def test_a_step_says_how_many_tokens_and_covers_every_row() -> None:
    spec = spec_of(**{"ppo.microBatchTokens": 3000, "reward.microBatchTokens": "Auto", "ppo.miniBatchSize": 16})
    plan = make_plan(spec, {"actor": 2, "critic": 2, "reward": 2})
    step = ppo_step(spec, plan, 1, StepFacts(0.0, True))
    dp = plan.parallelism["actor"].dp
    assert step.micro_batch_tokens == 3000
    forwards = [a for a in step.actions[0] if a.kind == "F" and a.model == "actor"]
    assert len(forwards) == 16 // dp
    # Eight pairs of two sequences of 1,024 tokens.
    assert supervised_step(spec, plan, Stage.REWARD, 1).micro_batch_tokens == 8 * 2 * 1024
    assert supervised_step(spec, plan, Stage.SFT, 1).micro_batch_tokens is None
    assert plan.schedule == "Serial"
    assert not applies(spec, plan)


GPUS = {
    "models.actor.source": {
        "scratch": {
            "config": {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "intermediate_size": 11008,
            }
        }
    },
    "ppo.globalBatchSize": 256,
    "ppo.miniBatchSize": 256,
    "groups": [
        {"name": "a", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 8}, "replicas": 2},
        {"name": "b", "roles": ["rollout"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 8}},
    ],
    "models.tokenizer": {"train": {"vocabSize": 32000}},
}


def test_the_planner_chooses_tokens_that_fit() -> None:
    plan = make_plan(spec_of(**GPUS, **{"ppo.microBatchTokens": "Auto"}))
    chosen = {b.micro_batch_tokens for b in plan.batching if b.stage is Stage.PPO}
    assert len(chosen) == 1
    assert chosen.pop() % 1024 == 0  # type: ignore[operator]
    assert plan.prediction is not None
    assert all(sum(m.parts.values()) <= m.capacity for m in plan.prediction.memory)


def test_a_budget_holds_more_of_short_samples_in_the_planners_work_too() -> None:
    rows = PlannedJob(spec_of(**{"ppo.microBatchSize": 4})).work
    tokens = PlannedJob(spec_of(**{"ppo.microBatchTokens": 4 * rows.longest})).work
    assert tokens.longest_micro_batch(2, 1) == rows.longest_micro_batch(2, 4) == 4 * rows.longest
    assert tokens.micro_batches(2, 1, longest=True) == rows.micro_batches(2, 4) == 8
    assert tokens.micro_batches(2, 1) < rows.micro_batches(2, 4)
    assert tokens.micro_batches(2, 1) * tokens.samples_together(2, 1) == 32
