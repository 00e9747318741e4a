"""Advantages against plain loops in float64, and the conventions of docs/algorithms.md."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.training_types import PPO
from dovetail.trainer.algorithms import advantages as adv
from helpers.recursive_gae import gae_recursive

unit = st.floats(0.0, 1.0)


def random_case(seed: int, batch: int, time: int, holes: bool) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(batch, time, generator=g, dtype=torch.float64)
    values = torch.randn(batch, time, generator=g, dtype=torch.float64)
    if holes:
        mask = torch.rand(batch, time, generator=g) > 0.4
    else:
        lengths = torch.randint(0, time + 1, (batch, 1), generator=g)
        mask = torch.arange(time) < lengths
    return rewards, values, mask


def loop_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 of Schulman et al. as its double sum, for one row without padding."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 4), st.integers(1, 200), unit, unit, st.booleans())
def test_gae_equals_its_definition(seed: int, batch: int, time: int, gamma: float, lam: float, holes: bool) -> None:
    rewards, values, mask = random_case(seed, batch, time, holes)
    advantages, returns = adv.gae(rewards, values, mask, gamma, lam)
    recursive = gae_recursive(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, recursive[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, recursive[1], rtol=1e-9, atol=1e-9)
    for b in range(batch):
        keep = mask[b]
        expected = loop_gae(rewards[b][keep].tolist(), values[b][keep].tolist(), gamma, lam)
        assert advantages[b][keep].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@pytest.mark.parametrize("w", [1.0, 0.99, 0.5, 1e-3, 1e-30, 0.0])
@pytest.mark.parametrize("time", [63, 64, 65, 4097])
def test_discounted_sums_survive_long_times_and_tiny_factors(w: float, time: int) -> None:
    x = torch.randn(2, time, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, time, dtype=torch.float64)
    carry = torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(time)):
        carry = x[:, t].double() + w * carry
        expected[:, t] = carry
    result = adv.discounted_sums(x, w)
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


def test_gae_ignores_whatever_stands_in_the_padding() -> None:
    rewards, values, mask = random_case(3, 5, 20, holes=False)
    dirty = torch.where(mask, values, float("nan"))
    clean = adv.gae(rewards, values, mask, 0.99, 0.95)
    for a, b in zip(adv.gae(rewards, dirty, mask, 0.99, 0.95), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("holes", [False, True])
def test_working_by_blocks_of_rows_changes_nothing(holes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, values, mask = random_case(11, 9, 40, holes)
    whole = [*adv.gae(rewards, values, mask, 0.99, 0.95), adv.whiten(values, mask)]
    monkeypatch.setattr(adv, "CPU_BLOCK_ELEMENTS", 80)
    blocks = [*adv.gae(rewards, values, mask, 0.99, 0.95), adv.whiten(values, mask)]
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gae_edge_shapes() -> None:
    one = torch.ones(1, 1)
    advantages, returns = adv.gae(one, 0.25 * one, one, 0.9, 0.9)
    assert advantages.item() == 0.75
    assert returns.item() == 1.0
    advantages, returns = adv.gae(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3), 0.9, 0.9)
    assert not advantages.any()
    assert not returns.any()
    assert adv.gae(torch.ones(2, 0), torch.ones(2, 0), torch.ones(2, 0), 0.9, 0.9)[0].shape == (2, 0)
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    assert adv.gae(half, half, half, 0.9, 0.9)[0].dtype == torch.float32


def test_lambda_one_makes_returns_the_discounted_rewards() -> None:
    rewards, values, mask = random_case(5, 3, 10, holes=False)
    _, returns = adv.gae(rewards, values, mask, 0.9, 1.0)
    masked = torch.where(mask, rewards, 0.0)
    torch.testing.assert_close(returns, torch.where(mask, adv.discounted_sums(masked, 0.9), 0.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=12))
def test_group_baselines_equal_plain_loops(samples: list[tuple[float, int]]) -> None:
    scores = torch.tensor([s for s, _ in samples], dtype=torch.float64)
    groups = torch.tensor([g for _, g in samples], dtype=torch.int32)
    mask = torch.ones(len(samples), 2)
    grpo, dr_grpo, rloo = (
        adv.grpo(scores, groups, mask),
        adv.grpo(scores, groups, mask, normalize_std=False),
        adv.rloo(scores, groups, mask),
    )
    for i, (score, group) in enumerate(samples):
        mates = [s for s, g in samples if g == group]
        if len(mates) == 1:
            assert grpo[i].tolist() == dr_grpo[i].tolist() == rloo[i].tolist() == [0.0, 0.0]
            continue
        mean = sum(mates) / len(mates)
        assert grpo[i, 1].item() == pytest.approx((score - mean) / (statistics.stdev(mates) + 1e-6), abs=1e-6, rel=1e-6)
        assert dr_grpo[i, 0].item() == pytest.approx(score - mean, abs=1e-9)
        others = (sum(mates) - score) / (len(mates) - 1)
        assert rloo[i, 0].item() == pytest.approx(score - others, abs=1e-9)


def test_equal_scores_of_a_group_give_no_advantage() -> None:
    scores = torch.full((3,), 0.1)
    groups = torch.zeros(3, dtype=torch.int32)
    assert adv.grpo(scores, groups, torch.ones(3, 1)).abs().max() < 1e-6
    assert adv.rloo(scores, groups, torch.ones(3, 1)).abs().max() < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 9), st.floats(-100, 100), st.floats(0.1, 50))
def test_whitened_tokens_have_mean_zero_and_unit_variance(
    seed: int, batch: int, time: int, mean: float, scale: float
) -> None:
    x, _, mask = random_case(seed, batch, time, holes=True)
    x = mean + scale * x
    white = adv.whiten(x, mask)
    kept = white[mask]
    assert not white[~mask].any()
    if len(kept) > 1:
        assert kept.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert kept.var(unbiased=True).item() == pytest.approx(1.0, abs=1e-2)
        scaled = adv.whiten(x, mask, shift_mean=False)[mask]
        assert scaled.mean().item() == pytest.approx(x[mask].mean().item(), rel=1e-6, abs=1e-6)
    else:
        assert not kept.any()


def test_whitening_a_constant_or_nothing_is_zero() -> None:
    assert not adv.whiten(torch.full((2, 2), 3.0), torch.ones(2, 2)).any()
    assert not adv.whiten(torch.full((2, 2), float("nan")), torch.zeros(2, 2)).any()


def test_the_score_arrives_at_the_last_response_token_and_is_clipped_before_the_penalty() -> None:
    kl = torch.tensor([[0.5, 1.0, 9.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    rewards = adv.token_rewards(
        torch.tensor([7.0, 3.0, -7.0]),
        kl,
        mask,
        0.1,
        reward_clip=5.0,
        finished=torch.tensor([True, True, False]),
        missing_eos_penalty=1.0,
    )
    expected = torch.tensor([[-0.05, 4.9, 0.0], [0.0, 0.0, 0.0], [-0.2, -0.2, -6.2]])
    torch.testing.assert_close(rewards, expected)


def test_a_penalty_needs_to_know_who_finished() -> None:
    with pytest.raises(ValueError, match="finished"):
        adv.sample_scores(torch.zeros(1), missing_eos_penalty=1.0)


# ---------------------------------------------------------------- dispatch


def batch_of(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([[4], [2], [3], [1]])
    return {
        "scores": torch.randn(4, generator=g),
        "logprobs": -torch.rand(4, 4, generator=g),
        "ref_logprobs": -torch.rand(4, 4, generator=g),
        "mask": torch.arange(4) < lengths,
        "groups": torch.tensor([0, 0, 1, 1], dtype=torch.int32),
        "finished": torch.tensor([1, 1, 0, 1], dtype=torch.uint8),
    }


def test_gae_dispatch_is_the_parts_in_order() -> None:
    batch = batch_of()
    values = torch.randn(4, 4, generator=torch.Generator().manual_seed(9))
    config = PPO(gamma=0.9, lam=0.8, reward_clip=0.5, missing_eos_penalty=0.25)
    result = adv.compute_advantages(config, kl_coef=0.1, values=values, **batch)
    kl = torch.where(batch["mask"], batch["logprobs"] - batch["ref_logprobs"], 0.0)
    score = batch["scores"].clamp(-0.5, 0.5) - torch.tensor([0.0, 0.0, 0.25, 0.0])
    rewards = -0.1 * kl
    for b, last in enumerate((3, 1, 2, 0)):
        rewards[b, last] += score[b]
    advantages, returns = gae_recursive(rewards, values, batch["mask"], 0.9, 0.8)
    torch.testing.assert_close(result.rewards, rewards)
    torch.testing.assert_close(result.kl, kl)
    torch.testing.assert_close(result.advantages, adv.whiten(advantages, batch["mask"]))
    torch.testing.assert_close(result.returns, returns)
    plain = config.model_copy(update={"whiten_advantages": False})
    unwhitened = adv.compute_advantages(plain, kl_coef=0.1, values=values, **batch)
    torch.testing.assert_close(unwhitened.advantages, advantages)


def test_group_methods_take_the_kl_penalty_off_the_score_and_are_not_whitened() -> None:
    batch = batch_of()
    kl = torch.where(batch["mask"], batch["logprobs"] - batch["ref_logprobs"], 0.0).sum(1)
    net = batch["scores"] - 0.1 * kl
    for name, function in (("grpo", adv.grpo), ("rloo", adv.rloo)):
        config = PPO(advantage=name, reward_clip=None)
        result = adv.compute_advantages(config, kl_coef=0.1, **batch)
        torch.testing.assert_close(result.advantages, function(net, batch["groups"], batch["mask"]))
        assert result.returns is None


@pytest.mark.parametrize("whiten_rewards", [False, True])
@pytest.mark.parametrize("advantage", ["gae", "grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_a_discarded_episode_has_no_say_in_the_others(advantage: Any, whiten_rewards: bool) -> None:
    """Its row has no token that is learnt, and a group of its own. Its score is of no account."""
    config, batch = PPO(advantage=advantage, whiten_rewards=whiten_rewards), batch_of()
    values = torch.randn_like(batch["logprobs"])
    gone = {name: torch.cat([tensor, tensor[:2]]) for name, tensor in batch.items()}
    gone["scores"][-2:] = torch.tensor([1e4, -1e4])
    gone["mask"][-2:] = False
    gone["groups"][-2:] = torch.tensor([-1, -2])
    found = adv.compute_advantages(config, kl_coef=0.1, values=torch.cat([values, values[:2]]), **gone)
    expected = adv.compute_advantages(config, kl_coef=0.1, values=values, **batch)
    torch.testing.assert_close(found.advantages[:-2], expected.advantages)
    assert not found.advantages[-2:].any()
    if expected.returns is not None:
        assert found.returns is not None
        torch.testing.assert_close(found.returns[:-2], expected.returns)


def test_whitened_rewards_keep_their_mean() -> None:
    batch = batch_of()
    plain = adv.compute_advantages(PPO(advantage="rloo"), kl_coef=0.1, **batch)
    white = adv.compute_advantages(PPO(advantage="rloo", whiten_rewards=True), kl_coef=0.1, **batch)
    mask = batch["mask"]
    assert white.rewards[mask].std().item() == pytest.approx(1.0, abs=1e-4)
    assert white.rewards[mask].mean().item() == pytest.approx(plain.rewards[mask].mean().item(), abs=1e-5)


def test_bad_input_is_refused() -> None:
    batch = batch_of()
    with pytest.raises(ValueError, match="values"):
        adv.compute_advantages(PPO(), kl_coef=0.0, **batch)
