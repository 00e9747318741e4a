"""Log-probabilities, KL, importance weights, EMA, the KL controller and the balanced partition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from dovetail.coordinator.loop.ppo_stage import KLController
from dovetail.manifest.training_types import KL
from dovetail.models.layers import logprobs
from dovetail.trainer.algorithms import balance, importance, kl
from dovetail.trainer.engine import optim


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 8 * 11 * 4, 2**26])
def test_logprobs_and_entropy_equal_softmax(temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CPU_CHUNK_BYTES", chunk)
    logits = (3 * draw(0, 2, 7, 11)).requires_grad_()
    tokens = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    lp, h = logprobs.logprobs_and_entropy(logits, tokens, temperature)
    table = torch.log_softmax(logits / temperature, -1)
    expected = table.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    expected_h = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(lp, expected)
    torch.testing.assert_close(h, expected_h)
    torch.testing.assert_close(logprobs.gather_logprobs(logits, tokens, temperature), expected)
    torch.testing.assert_close(logprobs.entropy(logits, temperature), expected_h)
    w, u = draw(2, 2, 7), draw(3, 2, 7)
    ours = torch.autograd.grad((w * lp + u * h).sum(), logits)[0]
    theirs = torch.autograd.grad((w * expected + u * expected_h).sum(), logits)[0]
    torch.testing.assert_close(ours, theirs)


def test_logprob_gradients_agree_with_finite_differences() -> None:
    tokens = torch.tensor([[1, 0, 3]])
    assert gradcheck(lambda x: logprobs.logprobs_and_entropy(x, tokens, 0.8), draw(4, 1, 3, 5).requires_grad_())


def test_low_precision_logits_are_reduced_in_float32() -> None:
    logits = draw(0, 1, 4, 300).to(torch.bfloat16).requires_grad_()
    tokens = torch.tensor([[5, 6, 7, 299]])
    lp = logprobs.gather_logprobs(logits, tokens)
    assert lp.dtype == torch.float32
    expected = torch.log_softmax(logits.detach().float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(lp.detach(), expected)
    lp.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_forbidden_tokens_have_no_part_in_the_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, float("-inf")]]], requires_grad=True)
    lp, h = logprobs.logprobs_and_entropy(logits, torch.tensor([[0]]))
    assert lp.item() == pytest.approx(-math.log(2))
    assert h.item() == pytest.approx(math.log(2))
    (lp + h).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_logprobs_refuse_bad_input() -> None:
    with pytest.raises(ValueError, match="temperature"):
        logprobs.gather_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), 0.0)
    with pytest.raises(ValueError, match="do not match"):
        logprobs.gather_logprobs(torch.zeros(1, 3, 2), torch.zeros(1, 1, dtype=torch.long))


# ---------------------------------------------------------------- KL


def test_estimators_equal_their_formulas() -> None:
    p, q, mask = draw(0, 2, 5), draw(1, 2, 5), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    r = (p - q) * mask
    torch.testing.assert_close(kl.kl_estimate(p, q, mask, "k1"), r)
    torch.testing.assert_close(kl.kl_estimate(p, q, mask, "k2"), r**2 / 2)
    torch.testing.assert_close(kl.kl_estimate(p, q, mask, "k3"), (torch.exp(-r) - 1 + r).clamp(max=10))
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl.kl_estimate(p, q, mask, "k4")  # type: ignore[arg-type]


def test_k1_and_k3_are_unbiased_estimates_of_the_kl() -> None:
    p, q = torch.log_softmax(draw(0, 6), 0), torch.log_softmax(draw(1, 6), 0)
    true = (p.exp() * (p - q)).sum()
    ones = torch.ones(1, 6)
    for name in ("k1", "k3"):
        mean = (p.exp() * kl.kl_estimate(p[None], q[None], ones, name)[0]).sum()  # type: ignore[arg-type]
        torch.testing.assert_close(mean, true)


def test_clamps_keep_impossible_tokens_finite() -> None:
    p = torch.tensor([[-1.0, -1e9, -1.0]])
    q = torch.tensor([[float("-inf"), -1.0, float("nan")]])
    mask = torch.tensor([[1, 1, 0]])
    assert kl.kl_estimate(p, q, mask, "k1").tolist() == [[20.0, -20.0, 0.0]]
    assert kl.kl_estimate(p, q, mask, "k2").tolist() == [[200.0, 200.0, 0.0]]
    k3 = kl.kl_estimate(p, q, mask, "k3")
    assert k3[0, 1].item() == 10.0
    assert torch.isfinite(k3).all()


def test_the_controller_follows_ziegler() -> None:
    controller = KLController.from_config(KL(coef=0.1, target=6.0, horizon=1000))
    assert controller.update(6.6, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(600.0, 100) == pytest.approx(0.101 * (1 + 0.2 * 0.1))
    assert controller.update(0.0, 100) == pytest.approx(0.10302 * (1 - 0.2 * 0.1))
    resumed = KLController.from_config(KL(coef=0.1, target=6.0, horizon=1000), controller.coef)
    assert resumed.update(3.0, 64) == controller.update(3.0, 64)
    before = controller.coef
    assert controller.update(float("nan"), 100) == before
    assert KLController.from_config(KL(coef=0.1)).update(100.0, 100) == 0.1


@given(st.floats(0, 1e6), st.integers(1, 10**9), st.floats(0.01, 100))
def test_the_coefficient_stays_positive(value: float, samples: int, target: float) -> None:
    after = KLController(0.05, target, 100).update(value, samples)
    assert 0.05 * 0.79 < after < 0.05 * 1.21


# ---------------------------------------------------------------- importance sampling


def test_weights_are_ratios_up_to_the_cap() -> None:
    trainer = torch.log(torch.tensor([[0.5, 0.9, 0.1, 0.3]])).requires_grad_()
    rollout = torch.log(torch.tensor([[0.5, 0.3, 0.2, 0.1]]))
    mask = torch.tensor([[1, 1, 1, 0]])
    weights = importance.truncated_weights(trainer, rollout, mask, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.5, 0.0]]))
    assert not weights.requires_grad
    metrics = importance.mismatch_metrics(trainer, rollout, mask, cap=2.0)
    d = [0.0, math.log(3), math.log(0.5)]
    expected = {
        "mismatch_tokens": 3,
        "mismatch_abs": math.log(3) + math.log(2),
        "mismatch_kl": -sum(d),
        "mismatch_ratio": 1 + 3 + 0.5,
        "mismatch_capped": 1,
        "mismatch_abs_max": math.log(3),
    }
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="cap"):
        importance.truncated_weights(trainer, rollout, mask, cap=0.0)


def test_padding_does_not_reach_the_metrics() -> None:
    bad = torch.tensor([[0.0, float("nan")]])
    metrics = importance.mismatch_metrics(bad, torch.zeros(1, 2), torch.tensor([[1, 0]]))
    assert metrics["mismatch_abs_max"].item() == metrics["mismatch_kl"].item() == 0
    empty = importance.mismatch_metrics(bad, bad, torch.zeros(1, 2))
    assert all(v.item() == 0 for v in empty.values())


# ---------------------------------------------------------------- EMA


def test_ema_averages_in_place_in_its_own_dtype() -> None:
    average = torch.zeros(3)
    start = average.data_ptr()
    parameter = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        optim.ema_update([average], [parameter], 0.9)
    assert average.data_ptr() == start
    assert average.tolist() == pytest.approx([1 - 0.9**3] * 3)
    with pytest.raises(ValueError, match="argument"):
        optim.ema_update([average], [], 0.9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        optim.ema_update([average], [parameter], 1.5)


# ---------------------------------------------------------------- balance


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6), st.booleans())
def test_partition_keeps_every_item_once(lengths: list[int], k: int, equal: bool) -> None:
    if equal and len(lengths) < k:
        with pytest.raises(ValueError, match="each of"):
            balance.partition(lengths, k, equal)
        return
    groups = balance.partition(lengths, k, equal)
    assert len(groups) == k
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    assert groups == balance.partition(lengths, k, equal)
    if equal:
        sizes = [len(g) for g in groups]
        assert max(sizes) - min(sizes) <= 1
    # Differencing never leaves a spread wider than the longest item.
    sums = [sum(lengths[i] for i in g) for g in groups]
    assert max(sums) - min(sums) <= max(lengths, default=0) or equal


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.integers(2, 3))
def test_partition_is_near_the_best(lengths: list[int], k: int) -> None:
    best = min(
        max(sum(x for x, g in zip(lengths, owner, strict=True) if g == b) for b in range(k))
        for owner in itertools.product(range(k), repeat=len(lengths))
    )
    ours = max(sum(lengths[i] for i in g) for g in balance.partition(lengths, k))
    # Graham-type bound of largest differencing: never worse than 4/3 - 1/(3k) of the best.
    assert ours <= best * (4 / 3 - 1 / (3 * k)) + 1e-9


def test_the_classic_example_of_karmarkar_and_karp() -> None:
    groups = balance.partition([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in g) for g in groups) == [14, 16]


def test_equal_counts_balance_a_long_tail() -> None:
    lengths = [1000, *([10] * 15)]
    groups = balance.partition(lengths, 4, equal_counts=True)
    assert [len(g) for g in groups] == [4, 4, 4, 4]
    assert max(sum(lengths[i] for i in g) for g in groups) == 1030


def test_partition_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match="0 groups"):
        balance.partition([1], 0)
    with pytest.raises(ValueError, match="negative"):
        balance.partition([-1], 1)
