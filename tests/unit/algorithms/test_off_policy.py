"""`ppo.lag`: samples of older weights, and what makes them count rightly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dovetail.manifest.checks.rules import check
from dovetail.manifest.resolve import resolve
from dovetail.manifest.training_types import PPO
from dovetail.protocol.sampling import asked_of_servers, served_temperature
from dovetail.protocol.wire import unpack
from dovetail.trainer.algorithms.importance import staleness_metrics, truncated_weights
from dovetail.trainer.steps.experience_batch import PPOSamples, recomputes_old_logprobs, targets
from helpers.jobs import tiny_job
from helpers.losses import policy_loss
from helpers.trainer_ranks import ppo_batch

BEHAVIOUR = torch.tensor([0.0, 0.6, -0.4], dtype=torch.float64)
PROXIMAL = torch.tensor([0.5, -0.2, 0.3], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)


def gradient_of_expected_advantage(theta: Tensor) -> Tensor:
    """Exactly, by the definition: d/dtheta of sum p(a) A(a)."""
    theta = theta.clone().requires_grad_()
    (torch.softmax(theta, 0) * ADVANTAGES).sum().backward()
    assert theta.grad is not None
    return theta.grad


def gradient_from_old_samples(cap: float | None) -> Tensor:
    """Of PPO's loss at the proximal policy, each action as often as the behaviour policy takes it."""
    theta = PROXIMAL.clone().requires_grad_()
    logprobs, behaviour = torch.log_softmax(theta, 0)[:, None], torch.log_softmax(BEHAVIOUR, 0)[:, None]
    proximal, mask = logprobs.detach(), torch.ones(3, 1, dtype=torch.bool)
    often = behaviour.exp()
    weights = often if cap is None else often * truncated_weights(proximal, behaviour, mask, cap)
    loss, _ = policy_loss(logprobs, proximal, ADVANTAGES[:, None], mask, normaliser=1.0, weights=weights)
    loss.backward()
    assert theta.grad is not None
    return -theta.grad


def test_weighed_old_samples_give_the_gradient_of_new_ones() -> None:
    wanted = gradient_of_expected_advantage(PROXIMAL)
    assert torch.allclose(gradient_from_old_samples(cap=100.0), wanted, atol=1e-12)
    # What the option is for: without weights the gradient is another one.
    assert (gradient_from_old_samples(cap=None) - wanted).abs().max() > 0.05


def samples(config: PPO) -> PPOSamples:
    return PPOSamples.read(unpack(ppo_batch(3)), config)


def test_the_loss_is_the_decoupled_objective() -> None:
    """AReaL's formula written down plainly, token by token: w min(u A, clip(u) A), w = p_prox / p_behave cut at the
    cap, u = p / p_prox."""
    config = PPO(lag=1, importance_sampling={"cap": 1.5}, whiten_advantages=False)
    batch = samples(config)
    generator = torch.Generator().manual_seed(0)
    proximal = batch.rollout_logprobs + 0.6 * torch.randn(batch.mask.shape, generator=generator) * batch.mask
    present = proximal + 0.4 * torch.randn(batch.mask.shape, generator=generator) * batch.mask
    goals = targets(batch, config, 0.0, proximal, iteration=2)
    assert goals.weights is not None
    found, _ = policy_loss(
        present, goals.old_logprobs, goals.advantages, batch.mask, normaliser=1.0, clip=config.clip,
        weights=goals.weights,
    )  # fmt: skip
    total = 0.0
    for n, r in batch.mask.nonzero().tolist():
        u = math.exp(float(present[n, r]) - float(proximal[n, r]))
        w = min(math.exp(float(proximal[n, r]) - float(batch.rollout_logprobs[n, r])), 1.5)
        a = float(goals.advantages[n, r])
        total += w * min(u * a, min(max(u, 0.8), 1.2) * a)
    assert float(found) == pytest.approx(-total, rel=1e-5)


def test_what_was_learnt_meanwhile_is_no_mismatch() -> None:
    config = PPO(lag=2)
    batch = samples(config)
    proximal = batch.rollout_logprobs + 1.0 * batch.mask
    first, second, last = (targets(batch, config, 0.0, proximal, iteration=i) for i in (1, 2, 7))
    # The first iteration trains the weights that sampled: a gap is an error there.
    assert first.metrics["mismatch_abs"] == pytest.approx(1.0, abs=1e-5)
    assert [goals.metrics["staleness"] for goals in (first, second, last)] == [0.0, 1.0, 2.0]
    for goals in (second, last):
        assert not [name for name in goals.metrics if name.startswith("mismatch")]
        assert goals.metrics["behaviour_kl"] == pytest.approx(-1.0, abs=1e-5)
        assert goals.metrics["importance_capped"] == 1.0


def test_without_a_lag_nothing_changes() -> None:
    batch = samples(PPO())
    proximal = batch.rollout_logprobs + 0.1 * batch.mask
    for iteration in (1, 5):
        goals = targets(batch, PPO(), 0.0, proximal, iteration=iteration)
        assert goals.staleness == 0
        assert "mismatch_abs" in goals.metrics
        assert not {"staleness", "effective_sample_size", "behaviour_kl"} & goals.metrics.keys()


def test_the_effective_sample_size_is_the_share_of_tokens_that_count() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    behaviour = torch.zeros(2, 3)
    equal = staleness_metrics(behaviour, behaviour, mask, None)
    assert equal == {
        "behaviour_kl": 0.0, "importance_ratio": 1.0, "importance_capped": 0.0, "effective_sample_size": 1.0,
    }  # fmt: skip
    # One token of four has nearly all the weight; what is outside the mask is not looked at.
    proximal = torch.tensor([[0.0, -15.0, -15.0], [-15.0, math.nan, math.nan]])
    one = staleness_metrics(proximal, behaviour, mask, None)
    assert one["effective_sample_size"] == pytest.approx(0.25, rel=1e-4)
    nothing = torch.zeros_like(mask)
    assert staleness_metrics(proximal, behaviour, nothing, None)["effective_sample_size"] == 0.0


def test_with_a_lag_the_trainer_recomputes() -> None:
    job = tiny_job(ppo={"lag": 1})
    assert resolve(tiny_job().spec).ppo.old_log_probs == "Rollout"
    assert resolve(job.spec).ppo.old_log_probs == "Recompute"
    assert not recomputes_old_logprobs(tiny_job().spec, "cpu")
    assert recomputes_old_logprobs(job.spec, "cpu")


@pytest.mark.parametrize("lag", [0, 1])
def test_servers_report_what_they_sample_from(lag: int) -> None:
    spec = tiny_job(ppo={"lag": lag}, generation={"temperature": 0.8, "maxTokens": 48}).spec
    assert (served_temperature(spec), asked_of_servers(spec).temperature) == (0.8, 1.0)
    assert asked_of_servers(spec, 0.0).temperature == 0.0, "an evaluation takes the most likely token"
    assert asked_of_servers(spec, 0.4).temperature == 0.5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"ppo": {"lag": 1, "oldLogProbs": "Rollout"}}, "spec.ppo.oldLogProbs is Rollout"),
    ],
)
def test_what_a_lag_excludes_is_refused(spec: dict[str, object], words: str) -> None:
    (sentence,) = check(tiny_job(**spec).spec)
    assert words in sentence
