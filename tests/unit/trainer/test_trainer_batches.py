from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.manifest.training_types import PPO
from dovetail.models.layers.token_ranks import TokenRanks
from dovetail.protocol.wire import unpack
from dovetail.trainer.command_errors import BadCommand
from dovetail.trainer.packed_batches import Sequences, mini_batches, read, shifted, split, split_padded, unpacked
from dovetail.trainer.steps.experience_batch import PPOSamples, recomputes_old_logprobs, response_positions, targets
from dovetail.trainer.steps.sft_step import predictions
from helpers.trainer_ranks import job, ppo_batch


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_row_is_dealt_once_in_micro_batches_of_one_size(
    data: st.DataObject, dp: int, micro: int, count: int
) -> None:
    n = dp * micro * count
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=n, max_size=n))
    parts = split(lengths, dp, micro)
    assert len(parts) == dp
    assert all(len(rank) == count and all(len(rows) == micro for rows in rank) for rank in parts)
    assert sorted(row for rank in parts for rows in rank for row in rows) == list(range(n))


def test_ranks_get_nearly_as_many_tokens() -> None:
    lengths = [100, 1, 1, 1, 99, 2, 1, 1]
    loads = [sum(lengths[row] for rows in rank for row in rows) for rank in split(lengths, 2, 2)]
    assert max(loads) - min(loads) <= 2


def test_micro_batches_of_a_rank_have_nearly_as_many_tokens_the_largest_first() -> None:
    lengths = [90, 50, 10, 10, 90, 51, 20, 20]
    sums = [[sum(lengths[row] for row in rows) for rows in rank] for rank in split(lengths, 1, 2)]
    assert sums == [[100, 100, 71, 70]]


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_packing_drops_the_padding_alone(data: st.DataObject, lengths: list[int]) -> None:
    count, width = len(lengths), max(lengths)
    tokens = torch.arange(1, count * width + 1).view(count, width)
    sequences = Sequences(tokens, torch.tensor(lengths))
    rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
    inside = torch.arange(width) < sequences.lengths.unsqueeze(1)
    drawn = data.draw(st.lists(st.booleans(), min_size=count * width, max_size=count * width))
    marked = torch.tensor(drawn).view(count, width) & inside
    packed = sequences.pack(rows, marked[rows])
    assert packed.lengths == tuple(lengths[row] for row in rows)
    assert packed.tokens[0].tolist() == [t for row in rows for t in tokens[row, : lengths[row]].tolist()]
    assert packed.tokens[0, packed.wanted].tolist() == [t for row in rows for t in tokens[row][marked[row]].tolist()]
    ends = {int(tokens[row, lengths[row] - 1]) for row in rows}
    for place, target in zip(packed.wanted.tolist(), packed.targets.tolist(), strict=True):
        assert int(packed.tokens[0, place]) in ends or target == int(packed.tokens[0, place + 1])
    values = packed.tokens[0, packed.wanted].float()
    assert torch.equal(unpacked(values, marked[rows]), torch.where(marked[rows], tokens[rows], 0).float())


@given(data=st.data(), size=st.integers(1, 5))
def test_ranks_that_share_tokens_have_each_wanted_one_once(data: st.DataObject, size: int) -> None:
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    sequences = Sequences(torch.arange(4 * len(lengths)).view(-1, 4), lengths)
    marked = torch.rand(len(lengths), 4, generator=torch.Generator().manual_seed(int(lengths.sum()))) < 0.5
    packed = sequences.pack(range(len(lengths)), marked & (torch.arange(4) < lengths.unsqueeze(1)))
    whole, ranks = packed.filled(size), TokenRanks()
    ranks.size = size
    assert torch.equal(whole.tokens[:, : packed.total], packed.tokens)
    assert (whole is packed) is (packed.total >= size)
    parts = []
    for ranks.rank in range(size):
        own = ranks.own(whole.total)
        part = whole.of(own)
        assert part.tokens.numel() == own.stop - own.start > 0
        assert torch.equal(part.wanted + own.start, packed.wanted[whole.asked(own)])
        parts.append(part)
    assert torch.equal(torch.cat([part.tokens for part in parts], 1), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), packed.targets)


def test_rows_that_do_not_divide_are_refused_with_the_reason() -> None:
    with pytest.raises(BadCommand, match="7 sequences cannot be split into micro-batches of 2 on 2"):
        split([3] * 7, 2, 2)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
def test_padded_split_counts_every_row_once_and_has_one_shape(count: int, dp: int, micro: int, least: int) -> None:
    parts = split_padded(count, dp, micro, least)
    assert len({len(rank) for rank in parts}) == 1
    assert len(parts[0]) >= least
    assert len({len(part.rows) for rank in parts for part in rank}) == 1
    real = [row for rank in parts for part in rank for row, w in zip(part.rows, part.weights, strict=True) if w]
    assert sorted(real) == list(range(count))


def test_mini_batches_are_permutations_that_depend_on_seed_step_and_epoch_alone() -> None:
    first = list(mini_batches(12, 4, 2, seed=1, step=3))
    assert first == list(mini_batches(12, 4, 2, seed=1, step=3))
    assert [epoch for epoch, _ in first] == [0, 0, 0, 1, 1, 1]
    epochs = [[row for e, rows in first if e == epoch for row in rows] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert first != list(mini_batches(12, 4, 2, seed=1, step=4))
    assert first != list(mini_batches(12, 4, 2, seed=2, step=3))
    with pytest.raises(BadCommand, match="miniBatchSize"):
        list(mini_batches(12, 5, 1, seed=1, step=1))


def test_arrays_are_checked_by_name_and_shape() -> None:
    with pytest.raises(BadCommand, match=r"no array 'lengths'; it has tokens"):
        Sequences.read({"tokens": np.zeros((2, 3), np.int32)})
    with pytest.raises(BadCommand, match=r"'lengths' has shape \[3\], expected 2"):
        Sequences.read({"tokens": np.zeros((2, 3), np.int32), "lengths": np.ones(3, np.int32)})
    with pytest.raises(BadCommand, match=r"'lengths' must lie in 1..3"):
        Sequences.read({"tokens": np.zeros((2, 3), np.int32), "lengths": np.array([1, 4], np.int32)})
    assert read({"x": np.ones((2, 1), np.uint8)}, "x", torch.bool, (2, None)).all()


def test_a_position_is_learnt_when_the_token_it_predicts_is_marked() -> None:
    sequences = Sequences(torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), torch.tensor([4, 2]))
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.uint8)
    assert predictions(sequences, mask).tolist() == [[False, True, True, False], [True, False, False, False]]
    assert shifted(sequences.tokens).tolist() == [[6, 7, 8, 0], [6, 0, 0, 0]]


def test_response_token_r_belongs_to_the_output_before_it() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    places = response_positions(torch.tensor([2, 4, 1, 3]), mask, 6)
    assert [row.nonzero().flatten().tolist() for row in places] == [[1, 2, 3], [3, 4], [], [2, 4]]


# ---------------------------------------------------------------- the whole batch


def samples(config: PPO, **changes: np.ndarray) -> PPOSamples:
    return PPOSamples.read({**unpack(ppo_batch(3)), **changes}, config)


def test_rewards_are_score_less_penalty_less_kl() -> None:
    config = PPO(kl={"coef": 0.1}, reward_clip=0.5, missing_eos_penalty=1.0, whiten_advantages=False, lam=1.0)
    batch = samples(config)
    got = targets(batch, config, 0.1, None)
    kl = ((batch.rollout_logprobs - batch.ref_logprobs) * batch.mask).sum(1)
    expected = batch.scores.clamp(-0.5, 0.5) - (~batch.finished).float() - 0.1 * kl
    assert got.metrics["reward_with_kl"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert got.metrics["kl"] == pytest.approx(float(kl.mean()), abs=1e-5)
    assert got.metrics["reward"] == pytest.approx(float(batch.scores.mean()), abs=1e-6)
    # gamma = lam = 1: the return of the first token is the whole reward
    assert got.returns is not None
    assert torch.allclose(got.returns[:, 0], expected, atol=1e-5)


def test_recomputed_log_probabilities_bring_truncated_weights_and_mismatch() -> None:
    config = PPO()
    batch = samples(config)
    trainer = batch.rollout_logprobs + 1.0 * batch.mask
    got = targets(batch, config, 0.0, trainer)
    assert got.weights is not None
    assert torch.all(got.weights[batch.mask] == 2.0)  # exp(1) cut to the cap
    assert got.metrics["mismatch_abs"] == pytest.approx(1.0, abs=1e-5)
    assert got.metrics["mismatch_kl"] == pytest.approx(-1.0, abs=1e-5)
    off = PPO(importance_sampling={"mode": "Off"})
    assert targets(batch, off, 0.0, trainer).weights is None


def test_given_advantages_are_used_as_they_come() -> None:
    config = PPO()
    plain = samples(config)
    given_ones = np.ones(tuple(plain.mask.shape), np.float32)
    batch = samples(config, advantages=given_ones, returns=2 * given_ones)
    got = targets(batch, config, 0.1, None)
    assert torch.equal(got.advantages, plain.mask.float())
    assert got.returns is not None
    assert torch.equal(got.returns, 2 * plain.mask.float())


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("scores", np.full(16, np.nan, np.float32), "'scores' holds a value that is not finite"),
        ("prompt_lengths", np.zeros(16, np.int32), "every prompt needs at least one token"),
        ("response_lengths", np.full(16, 11, np.int32), "must lie in"),
        ("groups", np.zeros(3, np.int32), "'groups' has shape"),
    ],
)
def test_bad_samples_are_named(array: str, value: np.ndarray, message: str) -> None:
    with pytest.raises(BadCommand, match=message):
        samples(PPO(), **{array: value})


def test_missing_values_are_named_only_where_they_are_needed() -> None:
    arrays = unpack(ppo_batch(3))
    del arrays["values"]
    with pytest.raises(BadCommand, match="no array 'values'"):
        PPOSamples.read(arrays, PPO())
    assert PPOSamples.read(arrays, PPO(advantage="grpo")).values is None


@pytest.mark.parametrize(
    ("change", "device", "recomputes"),
    [
        ({}, "cpu", False),
        ({}, "cuda", True),
        ({"generation": {"temperature": 0.7}}, "cpu", False),
        ({"generation": {"topK": 5}}, "cpu", True),
        ({"generation": {"topP": 0.9}}, "cpu", True),
        ({"ppo": {"oldLogProbs": "Recompute"}}, "cpu", True),
        ({"ppo": {"oldLogProbs": "Rollout"}}, "cuda", False),
    ],
)
def test_auto_trusts_the_rollout_only_where_both_compute_the_same(
    change: dict[str, object], device: str, recomputes: bool
) -> None:
    spec = {"ppo": {"oldLogProbs": "Auto"}, **change}
    assert recomputes_old_logprobs(job(**spec).spec, device) is recomputes
