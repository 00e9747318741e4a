"""Losses and gradients against formulas written out by hand, and shares that add up however a batch is cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from dovetail.trainer.algorithms import losses
from helpers.losses import policy_loss


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_policy_loss(logp: float, old: float, a: float, clip: float, dual: float | None, weight: float) -> float:
    ratio = math.exp(logp - old)
    surrogate = min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
    if dual is not None and a < 0:
        surrogate = max(surrogate, dual * a)
    return -surrogate * weight


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.floats(0.05, 0.5), st.none() | st.floats(1.1, 4.0))
def test_policy_loss_equals_the_formula(seed: int, clip: float, dual: float | None) -> None:
    logp, old, a = draw(seed, 3, 5), draw(seed + 1, 3, 5), draw(seed + 2, 3, 5)
    weights = draw(seed + 3, 3, 5).exp().clamp(max=2.0)
    mask = draw(seed + 4, 3, 5) > 0
    loss, stats = policy_loss(logp, old, a, mask, normaliser=7.0, clip=clip, dual_clip=dual, weights=weights)
    expected = 0.0
    ratios = 0.0
    for i, j in mask.nonzero().tolist():
        x, y, z = logp[i, j].item(), old[i, j].item(), a[i, j].item()
        expected += token_policy_loss(x, y, z, clip, dual, weights[i, j].item())
        ratios += math.exp(x - y)
    assert loss.item() == pytest.approx(expected / 7.0, abs=1e-9)
    assert stats["tokens"].item() == mask.sum().item()
    assert stats["policy_loss"].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert stats["ratio"].item() == pytest.approx(ratios, rel=1e-4)
    assert stats["approx_kl"].item() >= 0


def test_policy_gradient_is_the_formulas() -> None:
    """d loss / d log p = -A r w / n inside the clip range, 0 where the clip binds or the mask is 0."""
    old = torch.zeros(1, 5, dtype=torch.float64)
    logp = torch.tensor([[0.1, 0.5, 0.5, -0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[2.0, 2.0, -2.0, -2.0, 2.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    weights = torch.tensor([[1.5, 1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    loss, stats = policy_loss(logp, old, a, mask, normaliser=4, weights=weights)
    loss.backward()
    expected = [-2.0 * math.exp(0.1) * 1.5 / 4, 0.0, 2.0 * math.exp(0.5) / 4, 0.0, 0.0]
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx(expected)
    assert stats["clipfrac"].item() == 2


def test_the_first_pass_gives_the_plain_policy_gradient() -> None:
    logp = draw(0, 2, 3).requires_grad_()
    a, mask = draw(1, 2, 3), torch.ones(2, 3)
    loss, stats = policy_loss(logp, logp.detach(), a, mask, normaliser=6)
    loss.backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -a / 6)
    assert stats["clipfrac"].item() == stats["approx_kl"].item() == 0


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    logp = torch.tensor([[3.0, 3.0]], requires_grad=True)
    a = torch.tensor([[-1.0, 1.0]])
    loss, stats = policy_loss(logp, torch.zeros(1, 2), a, torch.ones(1, 2), normaliser=1, dual_clip=3.0)
    assert loss.item() == pytest.approx(3.0 - 1.2)
    assert stats["dual_clipfrac"].item() == 1
    loss.backward()
    assert logp.grad is not None
    assert not logp.grad.any()
    with pytest.raises(ValueError, match="dual"):
        policy_loss(logp, torch.zeros(1, 2), a, torch.ones(1, 2), normaliser=1, dual_clip=1.0)


def test_values_in_the_padding_change_neither_loss_nor_gradient() -> None:
    mask = torch.tensor([[1, 0]])
    bad = torch.tensor([[0.1, float("nan")]])
    logp = torch.tensor([[0.2, float("-inf")]], requires_grad=True)
    loss, stats = policy_loss(logp, bad, bad, mask, normaliser=1)
    value, _ = losses.value_loss(logp, bad, bad, mask, normaliser=1)
    sft, _ = losses.sft_loss(logp, mask, normaliser=1)
    pair, _ = losses.reward_loss(logp[0], bad[0], mask=mask[0], normaliser=1)
    total = loss + value + sft + pair
    assert torch.isfinite(total)
    assert all(torch.isfinite(s) for s in stats.values())
    total.backward()
    assert logp.grad is not None
    assert logp.grad[0, 1].item() == 0
    assert torch.isfinite(logp.grad).all()


def test_wild_log_ratios_stay_finite() -> None:
    logp = torch.tensor([[500.0, -500.0]])
    loss, stats = policy_loss(logp, torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2), normaliser=1)
    assert torch.isfinite(loss)
    assert stats["ratio"].item() == pytest.approx(math.exp(20.0), rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.none() | st.floats(0.05, 1.0))
def test_value_loss_equals_the_formula(seed: int, clip: float | None) -> None:
    v, old, r = draw(seed, 3, 4), draw(seed + 1, 3, 4), draw(seed + 2, 3, 4)
    mask = draw(seed + 3, 3, 4) > 0
    loss, stats = losses.value_loss(v, old, r, mask, normaliser=5, clip=clip)
    expected = 0.0
    for i, j in mask.nonzero().tolist():
        x, o, t = v[i, j].item(), old[i, j].item(), r[i, j].item()
        near = x if clip is None else min(max(x, o - clip), o + clip)
        expected += 0.5 * max((x - t) ** 2, (near - t) ** 2)
    assert loss.item() == pytest.approx(expected / 5)
    assert stats["value_tokens"].item() == mask.sum().item()


def test_values_within_the_limit_are_not_counted_as_clipped() -> None:
    """old + (v - old) is seldom v in floating point. Then values beyond the limit, whose error grows or shrinks."""
    random = torch.Generator().manual_seed(0)
    v, change, returns = (torch.randn(8, 64, generator=random) for _ in range(3))
    old = v - 0.15 * change.clamp(-1, 1)
    _, stats = losses.value_loss(v, old, returns, torch.ones(8, 64), normaliser=1, clip=0.2)
    assert stats["value_clipped"].item() == 0
    old = v - torch.tensor([0.3, -0.3, 0.1]).repeat(8, 64)[:, :64]
    towards = v + torch.where(v > old, 1.0, -1.0)  # clipping keeps them farther from their returns
    _, stats = losses.value_loss(v, old, towards, torch.ones(8, 64), normaliser=1, clip=0.2)
    assert stats["value_clipped"].item() == ((v - old).abs() > 0.2).sum()
    _, stats = losses.value_loss(v, old, 2 * old - towards, torch.ones(8, 64), normaliser=1, clip=0.2)
    assert stats["value_clipped"].item() == 0


def test_value_gradient_is_error_over_count() -> None:
    v = torch.tensor([[1.0, 2.0]], requires_grad=True)
    loss, _ = losses.value_loss(v, v.detach(), torch.tensor([[0.5, 4.0]]), torch.ones(1, 2), normaliser=2, clip=0.2)
    loss.backward()
    assert v.grad is not None
    assert v.grad[0].tolist() == [0.25, -1.0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 3))
def test_shares_of_micro_batches_add_up_to_the_whole(seed: int, size: int, time: int) -> None:
    n = 6
    logp, old, a, r = (draw(seed + i, n, time) for i in range(4))
    mask = draw(seed + 9, n, time) > -0.5
    count = mask.sum().clamp(min=1)

    def parts(rows: slice) -> list[tuple[torch.Tensor, losses.Stats]]:
        x, o, adv, ret, m = logp[rows], old[rows], a[rows], r[rows], mask[rows]
        return [
            policy_loss(x, o, adv, m, normaliser=count, dual_clip=3.0),
            losses.value_loss(x, o, ret, m, normaliser=count),
            losses.sft_loss(x, m, normaliser=count),
            losses.ptx_loss(x, m, normaliser=count, coef=0.5),
            losses.entropy_bonus(x, m, normaliser=count, coef=0.01),
            losses.reward_loss(x[:, 0], o[:, 0], normaliser=n),
        ]

    whole = parts(slice(0, n))
    cut = [parts(slice(start, start + size)) for start in range(0, n, size)]
    for k, (loss, stats) in enumerate(whole):
        torch.testing.assert_close(sum(p[k][0] for p in cut), loss)
        for name, value in stats.items():
            torch.testing.assert_close(sum(p[k][1][name] for p in cut), value, rtol=1e-4, atol=1e-4)


def test_reward_loss_equals_the_formula_and_a_tie_is_wrong() -> None:
    chosen = torch.tensor([1.0, 0.5, 0.0, 9.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 0.5, 2.0, float("nan")], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    loss, stats = losses.reward_loss(chosen, rejected, normaliser=3, mask=mask)
    margins = [1.0, 0.0, -2.0]
    assert loss.item() == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 3)
    assert (stats["correct"].item(), stats["pairs"].item()) == (1, 3)
    assert stats["margin"].item() == pytest.approx(-1.0)
    loss.backward()
    assert chosen.grad is not None
    expected = [-1 / (1 + math.exp(m)) / 3 for m in margins]
    assert chosen.grad.tolist() == pytest.approx([*expected, 0.0])


def test_a_far_wrong_pair_has_a_finite_loss() -> None:
    loss, _ = losses.reward_loss(torch.tensor([-1e4]), torch.tensor([1e4]), normaliser=1)
    assert loss.item() == pytest.approx(2e4)


def test_supervised_losses_are_means_over_tokens() -> None:
    logp = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    loss, stats = losses.sft_loss(logp, mask, normaliser=3)
    assert loss.item() == pytest.approx(2.0)
    assert (stats["tokens"].item(), stats["loss"].item()) == (3, 6)
    assert losses.ptx_loss(logp, mask, normaliser=3, coef=0.1)[0].item() == pytest.approx(0.2)
    assert losses.entropy_bonus(-logp, mask, normaliser=3, coef=0.1)[0].item() == pytest.approx(-0.2)


def test_an_all_masked_batch_is_zero_with_zero_gradient() -> None:
    logp = draw(0, 2, 3).requires_grad_()
    none = torch.zeros(2, 3)
    loss = sum(
        part[0]
        for part in (
            policy_loss(logp, logp.detach(), logp.detach(), none, normaliser=1),
            losses.value_loss(logp, logp.detach(), logp.detach(), none, normaliser=1),
            losses.sft_loss(logp, none, normaliser=1),
        )
    )
    loss.backward()
    assert loss.item() == 0
    assert logp.grad is not None
    assert not logp.grad.any()


def test_gradients_agree_with_finite_differences() -> None:
    x = draw(1, 2, 3).requires_grad_()
    old, a, mask = draw(2, 2, 3), draw(3, 2, 3), torch.ones(2, 3)
    assert gradcheck(lambda p: policy_loss(p, old, a, mask, normaliser=6, dual_clip=3.0)[0], x)
    assert gradcheck(lambda p: losses.value_loss(p, old, a, mask, normaliser=6)[0], x)
    assert gradcheck(lambda p: losses.reward_loss(p[:, 0], p[:, 1], normaliser=2)[0], x)
