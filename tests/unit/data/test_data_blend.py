"""Splits are disjoint, blends keep their proportions, and everything is a function of seed and step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.data.collection import Blend, hold_out, split
from dovetail.protocol.sampling import derived_seed, sample_seed

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)
shares = st.fixed_dictionaries({k: st.floats(0, 10) for k in ("sft", "reward", "ppo")}).filter(
    lambda s: sum(s.values()) > 0
)


@given(st.integers(0, 500), shares, st.integers(0, 99))
def test_split_is_a_partition_in_proportion(size: int, parts: dict[str, float], seed: int) -> None:
    result = split(size, parts, seed)
    assert sorted(i for part in result.values() for i in part.tolist()) == list(range(size))
    total, positive = sum(parts.values()), sum(v > 0 for v in parts.values())
    for name, part in result.items():
        if parts[name] == 0:
            assert len(part) == 0
        else:
            assert abs(len(part) - size * parts[name] / total) <= 1 + positive
            assert len(part) >= 1 or size < positive


def test_split_depends_on_the_seed_only() -> None:
    parts = {"sft": 2.0, "reward": 4.0, "ppo": 4.0}
    first, again, other = (split(100, parts, seed) for seed in (1, 1, 2))
    assert {k: v.tolist() for k, v in first.items()} == {k: v.tolist() for k, v in again.items()}
    assert first["sft"].tolist() != other["sft"].tolist()
    assert {k: len(v) for k, v in first.items()} == {"sft": 20, "reward": 40, "ppo": 40}
    with pytest.raises(ValueError, match="no share"):
        split(3, {"sft": 0.0})


@given(st.integers(1, 200), st.floats(0, 1))
def test_hold_out(size: int, share: float) -> None:
    train, held = hold_out(split(size, {"a": 1.0}, 0)["a"], share)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(size))
    if share < 1:
        assert len(train) >= 1
    if 0 < share < 1 and size > 1:
        assert len(held) >= 1
    assert abs(len(held) - size * share) <= 1


@settings(deadline=None)
@given(sizes, st.data(), st.integers(0, 99))
def test_blend_keeps_proportions_and_repeats_nothing_within_an_epoch(
    lengths: list[int], data: st.DataObject, seed: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(lengths), max_size=len(lengths)))
    blend = Blend(lengths, weights, seed)
    n = 200
    picks = [blend.pick(i) for i in range(n)]
    counts = Counter(source for source, _ in picks)
    for source, length in enumerate(lengths):
        assert abs(counts[source] - n * weights[source] / sum(weights)) <= len(lengths)
        positions = [p for s, p in picks if s == source]
        for start in range(0, len(positions), length):
            epoch = positions[start : start + length]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(length))


@settings(deadline=None)
@given(sizes, st.integers(1, 30), st.integers(1, 16), st.integers(0, 99))
def test_a_batch_is_a_function_of_the_step(lengths: list[int], step: int, size: int, seed: int) -> None:
    weights = [1.0 + i for i in range(len(lengths))]
    walked = Blend(lengths, weights, seed)
    history = [walked.batch(s, size) for s in range(1, step + 1)]
    assert Blend(lengths, weights, seed).batch(step, size) == history[-1]
    assert walked.batch(1, size) == history[0]


def test_epochs_have_orders_of_their_own() -> None:
    blend = Blend([50], [1.0], 0)
    assert blend.batch(1, 50) != blend.batch(2, 50)
    assert sorted(blend.batch(1, 50)) == sorted(blend.batch(2, 50))


@pytest.mark.parametrize(("lengths", "weights"), [([0], [1.0]), ([1], [0.0]), ([], []), ([1, 2], [1.0])])
def test_impossible_blends_are_refused(lengths: list[int], weights: list[float]) -> None:
    with pytest.raises(ValueError, match="a blend needs"):
        Blend(lengths, weights)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1, not 0"):
        Blend([3], [1.0]).batch(0, 2)


def test_seeds_are_pinned() -> None:
    """A job begun with one release and resumed with the next must draw the same samples."""
    assert sample_seed(0, 1, 2, 3) == derived_seed("sample", 0, 1, 2, 3) == 476758835948658368
    seeds = {sample_seed(s, i, p, k) for s in range(3) for i in range(5) for p in range(20) for k in range(4)}
    assert len(seeds) == 3 * 5 * 20 * 4
    assert all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(1, 11, 1, 1) != sample_seed(11, 1, 1, 1)
