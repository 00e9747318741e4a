"""Every KL setting that a job may have, on a bandit whose optimum is known: one token, three actions, exact
expectations, through the real advantages and losses.

The objective E[r] - coef KL(policy || reference) has the optimum policy ~ reference exp(r / coef). Where a
normalisation makes the objective another one (GRPO's deviation; its mean, beside a penalty in the loss), the optimum of
that one is expected, found here without the code under test."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.manifest.checks.rules import check
from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import RLHFJobSpec
from dovetail.trainer.algorithms import advantages as adv
from dovetail.trainer.algorithms.kl import Estimator, kl_estimate, kl_loss
from helpers.jobs import tiny_job
from helpers.losses import policy_loss

REFERENCE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 1.0, 0.3], dtype=torch.float64)
COEF = 0.4
GROUP = 3
GROUPS = torch.tensor(list(itertools.product(range(3), repeat=GROUP)))


def softmax_of(gain: np.ndarray) -> np.ndarray:
    p = REFERENCE.numpy() * np.exp(gain)
    return p / p.sum()


EXACT = softmax_of(REWARDS.numpy() / COEF)


def group_gain(p: np.ndarray) -> np.ndarray:
    """Mean of (r - group mean) / (group deviation + 1e-6) of each action, its group's others drawn from p."""
    r, gain = REWARDS.numpy(), np.zeros(3)
    for action, *others in itertools.product(range(3), repeat=GROUP):
        scores = r[[action, *others]]
        gain[action] += np.prod(p[others]) * (scores[0] - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    return gain


def fixed_point(gain) -> np.ndarray:  # type: ignore[no-untyped-def]
    p = REFERENCE.numpy()
    for _ in range(500):
        p = 0.5 * p + 0.5 * softmax_of(gain(p) / COEF)
    return p


def one_update(theta: Tensor, config: PPO, rate: float, coef: float = COEF) -> Tensor:
    """Two optimizer steps on the same samples, each along the gradient by action probability (so that a rare action
    learns as fast)."""
    old = torch.log_softmax(theta, 0)
    p = old.exp()
    grouped = config.compares_samples
    # A row is a sample of a group of GROUP, or a sample by itself.
    rows = GROUPS if grouped else torch.arange(3)[:, None]
    weights = p[rows].prod(1)
    if config.advantage.startswith("reinforce") or config.whiten_rewards or (not grouped and config.whiten_advantages):
        # As many rows of each kind as its probability says: whitening looks at all of them alike.
        rows = rows.repeat_interleave((weights * 1000).round().long(), 0)
        weights = torch.full((len(rows),), 1.0 / len(rows), dtype=torch.float64)
    actions, groups = rows.flatten(), torch.arange(len(rows)).repeat_interleave(rows.shape[1])
    weights, normaliser = weights.repeat_interleave(rows.shape[1])[:, None], float(rows.shape[1])
    mask = torch.ones(len(actions), 1, dtype=torch.bool)
    before, reference = old[actions][:, None], REFERENCE.log()[actions][:, None]
    value = (p * (REWARDS - (0.0 if config.kl_in_loss else coef) * (old - REFERENCE.log()))).sum()
    made = adv.compute_advantages(
        config,
        scores=REWARDS[actions],
        logprobs=before,
        ref_logprobs=reference,
        mask=mask,
        groups=groups,
        finished=mask[:, 0],
        kl_coef=coef,
        values=value.expand(len(actions), 1) if config.advantage == "gae" else None,
    )
    for _ in range(2):
        theta = theta.detach().requires_grad_(True)
        logprobs = torch.log_softmax(theta, 0)[actions][:, None]
        loss, _ = policy_loss(logprobs, before, made.advantages, mask, normaliser=normaliser, weights=weights)
        if config.kl_in_loss:
            estimator = config.kl_estimator
            more, _ = kl_loss(
                logprobs, reference, mask, normaliser=normaliser, coef=coef, estimator=estimator, weights=weights
            )
            loss = loss + more
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = (theta - rate * gradient / p).detach()
    return theta


def test_distillation_ends_at_the_teacher_whatever_the_rewards() -> None:
    """The reference is the teacher; the policy begins elsewhere."""
    config = PPO.model_validate({"advantage": "distillation", "kl": {"coef": 0}})
    theta = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
    for step in range(160):
        theta = one_update(theta, config, rate=0.5 * 0.96**step, coef=0.0)
    assert torch.softmax(theta, 0).numpy() == pytest.approx(REFERENCE.numpy(), abs=1e-3)


def learnt(config: PPO, steps: int = 160) -> np.ndarray:
    theta = REFERENCE.log()
    for step in range(steps):
        theta = one_update(theta, config, rate=0.5 * 0.96**step)
    return torch.softmax(theta, 0).numpy()


SPEC = tiny_job().spec


def job_with(config: PPO) -> RLHFJobSpec:
    return SPEC.model_copy(update={"ppo": config})


def ppo(advantage: str, place: str, estimator: str = "Auto", **fields: object) -> PPO:
    kl = {"in": place, "estimator": estimator}
    sizes = {"samplesPerPrompt": GROUP, "globalBatchSize": 12, "miniBatchSize": 12, "microBatchSize": 4}
    return PPO.model_validate({"advantage": advantage, "kl": kl, "lam": 1.0, **sizes, **fields})


ONCE = (GROUP - 1) / GROUP
NORMALISED = fixed_point(group_gain)
METHODS: list[tuple[str, dict[str, bool]]] = [
    ("gae", {}),
    ("gae", {"whitenAdvantages": False}),
    ("rloo", {}),
    ("grpo", {}),
    ("grpo", {"normalizeStd": False}),
    ("reinforce++", {}),
    ("reinforce++-baseline", {}),
]
SETTINGS = [
    ppo(method, place, estimator, whitenRewards=whiten, **fields)
    for method, fields in METHODS
    for whiten in (False, True)
    for place, estimator in itertools.product(("Reward", "Loss"), ("k1", "k2", "k3"))
]
ACCEPTED = [setting for setting in SETTINGS if not check(job_with(setting))]


def optimum_of(config: PPO) -> np.ndarray:
    if config.advantage == "grpo" and config.normalize_std:
        return NORMALISED
    if config.advantage == "grpo" and config.kl_in_loss:
        # The group's mean holds the sample itself, which takes 1/n of its score away, but nothing of the penalty.
        return softmax_of(ONCE * REWARDS.numpy() / COEF)
    return EXACT


def name_of(config: PPO) -> str:
    kl, flags = config.kl, (config.normalize_std, config.whiten_advantages, config.whiten_rewards)
    return "-".join(map(str, (config.advantage, kl.place, kl.estimator, *flags)))


@pytest.mark.slow
@pytest.mark.parametrize("config", ACCEPTED, ids=name_of)
def test_every_accepted_setting_ends_at_its_objectives_optimum(config: PPO) -> None:
    optimum = optimum_of(config)
    assert np.abs(optimum - REFERENCE.numpy()).max() > 0.1, "there is something to learn"
    np.testing.assert_allclose(learnt(config), optimum, atol=1e-3)


def test_auto_is_one_of_the_accepted_settings_of_each_method() -> None:
    accepted = {(c.advantage, c.normalize_std, c.kl_in_loss, c.kl_estimator) for c in ACCEPTED}
    for method, fields in METHODS:
        config = ppo(method, "Auto", **fields)
        assert check(job_with(config)) == []
        assert (method, config.normalize_std, config.kl_in_loss, config.kl_estimator) in accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "fields"),
    [("gae", {}), ("reinforce++", {}), ("reinforce++-baseline", {}), ("rloo", {"whitenRewards": True})],
)
def test_a_penalty_in_the_loss_beside_whitened_scores_is_refused_because_it_vanishes(
    method: str, fields: dict[str, bool]
) -> None:
    config = ppo(method, "Loss", **fields)
    (sentence,) = check(job_with(config))
    assert sentence.startswith("spec.ppo.kl.in is Loss, but spec.ppo.")
    assert "divides by a deviation over the whole batch" in sentence
    assert np.abs(learnt(config) - EXACT).sum() / 2 > 0.1
    without = config.model_copy(update={"kl": config.kl.model_copy(update={"coef": 0.0})})
    assert check(job_with(without)) == [], "there is no penalty"


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_estimators_that_a_reward_refuses_miss_the_optimum(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards all 0: the optimum is the reference, and a policy that starts elsewhere must go there."""
    config = ppo("rloo", "Reward")
    with pytest.raises(ValueError, match=rf"kl\.estimator {estimator} in the reward"):
        one_update(REFERENCE.log(), ppo("rloo", "Reward", estimator), rate=0.1)
    start = torch.tensor([0.05, 0.9, 0.05], dtype=torch.float64).log()

    def distance() -> float:
        theta = start
        for step in range(160):
            theta = one_update(theta, config, rate=0.5 * 0.96**step)
        return float((torch.softmax(theta, 0) - REFERENCE).abs().max())

    monkeypatch.setattr(f"{__name__}.REWARDS", torch.zeros(3, dtype=torch.float64))
    assert distance() < 1e-3
    monkeypatch.setattr(adv, "kl_estimate", lambda a, b, mask, _: kl_estimate(a, b, mask, estimator))
    assert distance() > 0.05


def test_k1_in_the_loss_is_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"kl\.estimator k1 in the loss"):
        kl_loss(one, one, one.bool(), normaliser=1.0, coef=1.0, estimator="k1")


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_losss_gradient_is_that_of_the_divergence(estimator: Estimator) -> None:
    """Also where the reference forbids what the policy says: a clamp must not free it."""
    theta = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    p = torch.log_softmax(theta, 0)
    (expected,) = torch.autograd.grad((p.exp() * (p - REFERENCE.log())).sum(), theta, retain_graph=True)
    mask = torch.ones(3, 1, dtype=torch.bool)
    loss, stats = kl_loss(
        p[:, None],
        REFERENCE.log()[:, None],
        mask,
        normaliser=1.0,
        coef=1.0,
        estimator=estimator,
        weights=p.detach().exp()[:, None],
    )
    (found,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(found, expected)
    assert float(stats["kl_loss"]) == pytest.approx(loss.item())
    if estimator == "k3":
        assert loss.item() == pytest.approx((p.exp() * (p - REFERENCE.log())).sum().item())
    far = torch.zeros(1, 1, requires_grad=True)
    loss, _ = kl_loss(far, far.detach() - 50.0, mask[:1], normaliser=1.0, coef=1.0, estimator=estimator)
    (gradient,) = torch.autograd.grad(loss, far)
    assert float(gradient) == 20.0


@pytest.mark.parametrize("coef", [1e-5, 1e-3, 0.05])
def test_a_group_of_equal_scores_learns_the_penalty_at_its_coefficient(coef: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ratio = torch.randn(64, 1, generator=generator)
    groups, mask = torch.arange(64) // 4, torch.ones(64, 1, dtype=torch.bool)

    def rms(config: PPO) -> float:
        made = adv.compute_advantages(
            config,
            scores=torch.ones(64),
            logprobs=ratio,
            ref_logprobs=torch.zeros(64, 1),
            mask=mask,
            groups=groups,
            finished=mask[:, 0],
            kl_coef=coef,
        )
        return float(made.advantages.square().mean().sqrt())

    assert rms(ppo("grpo", "Auto")) == 0.0, "the penalty is in the loss"
    assert rms(ppo("grpo", "Reward")) == pytest.approx(rms(ppo("rloo", "Reward")), rel=0.01)
    assert 0.5 * coef < rms(ppo("grpo", "Reward")) < 2.0 * coef
