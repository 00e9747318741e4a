"""What holds whatever callers hand in: low precision, offsets, soft masks, contended threads; and how token
losses become one number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.manifest.resolve import reward_clip
from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import Stage
from dovetail.protocol.wire import pack, unpack
from dovetail.trainer.algorithms import advantages as adv
from dovetail.trainer.algorithms import losses
from dovetail.trainer.algorithms.importance import mismatch_metrics, truncated_weights
from dovetail.trainer.algorithms.kl import kl_estimate, kl_loss
from dovetail.trainer.steps.experience_batch import PPOSamples, targets
from helpers.local_trainer import LocalTrainer
from helpers.losses import policy_loss
from helpers.recursive_gae import gae_recursive
from helpers.trainer_ranks import job, load_command, ppo_batch

N, T = 64, 512


def tables(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(N, T, generator=generator) * 0.1 - 3.0).to(dtype) for _ in range(4)]


def test_low_precision_is_summed_in_float32() -> None:
    low = tables(torch.bfloat16)
    mask = torch.ones(N, T, dtype=torch.bool)
    norm = float(N * T)

    def results(x: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            policy_loss(x[0], x[1], x[2], mask, normaliser=norm)[0],
            losses.value_loss(x[0], x[1], x[2], mask, normaliser=norm)[0],
            losses.sft_loss(x[0], mask, normaliser=norm)[0],
            losses.ptx_loss(x[0], mask, normaliser=norm, coef=1.0)[0],
            losses.entropy_bonus(x[0], mask, normaliser=norm, coef=1.0)[0],
            losses.reward_loss(x[0][:, 0], x[1][:, 0], normaliser=N)[0],
            kl_loss(x[0], x[1], mask, normaliser=norm, coef=1.0)[0],
            kl_estimate(x[0], x[1], mask, "k1").sum(),
            kl_estimate(x[0], x[1], mask, "k3").sum(),
            mismatch_metrics(x[0], x[1], mask)["mismatch_abs"],
            truncated_weights(x[0], x[1], mask).sum(),
            adv.token_rewards(x[0][:, 0], kl_estimate(x[0], x[1], mask), mask, 0.1).sum(),
            gae_recursive(x[0], x[1], mask, 0.99, 0.95)[0].sum(),
            adv.gae(x[0], x[1], mask, 0.99, 0.95)[0].sum(),
        ]

    for found, expected in zip(results(low), results([x.double() for x in low]), strict=True):
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(float(expected), rel=2e-5, abs=1e-5)


def test_whitening_far_from_zero_keeps_its_digits() -> None:
    x = torch.tensor([[1e6 + 0.5, 1e6 - 0.5, 1e6 + 1.5, 1e6 + 0.5]])
    mask = torch.ones_like(x)
    mean = x.double().mean()
    expected = (x.double() - mean) / x.double().std()
    torch.testing.assert_close(adv.whiten(x, mask).double(), expected, atol=1e-6, rtol=1e-6)
    y = torch.full((1, 3), 16777217.0) + torch.tensor([[0.0, 2.0, 6.0]])
    white = adv.whiten(y, torch.ones_like(y))
    assert float(white.sum()) == pytest.approx(0.0, abs=1e-5), "the mean is not rounded to float32 first"


def test_a_soft_mask_is_refused_everywhere() -> None:
    x, soft = torch.ones(2, 3), torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 0.0]])
    for call in (
        lambda: policy_loss(x, x, x, soft, normaliser=1.0),
        lambda: losses.value_loss(x, x, x, soft, normaliser=1.0),
        lambda: losses.sft_loss(x, soft, normaliser=1.0),
        lambda: losses.ptx_loss(x, soft, normaliser=1.0, coef=1.0),
        lambda: losses.entropy_bonus(x, soft, normaliser=1.0, coef=1.0),
        lambda: kl_estimate(x, x, soft),
        lambda: truncated_weights(x, x, soft),
        lambda: mismatch_metrics(x, x, soft),
        lambda: adv.gae(x, x, soft, 1.0, 1.0),
        lambda: adv.grpo(torch.ones(2), torch.zeros(2), soft),
        lambda: adv.rloo(torch.ones(2), torch.zeros(2), soft),
        lambda: adv.whiten(x, soft),
    ):
        with pytest.raises(ValueError, match="a mask holds 0 and 1 alone"):
            call()
    hard = (soft > 0.7).float()
    assert torch.equal(
        adv.rloo(torch.tensor([1.0, 0.0]), torch.zeros(2), hard), torch.tensor([[1, 0, 0], [-1, -1, 0.0]])
    )


def test_gae_runs_on_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that others keep from running make the many small products a hundred times slower."""
    seen: list[int] = []
    product = adv.discounted_sums
    monkeypatch.setattr(adv, "discounted_sums", lambda x, w: (seen.append(torch.get_num_threads()), product(x, w))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        adv.gae(torch.ones(2, 200), torch.ones(2, 200), torch.ones(2, 200), 0.99, 0.95)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- aggregation


LENGTHS = torch.tensor([1, 4, 7, 2])


def by_hand(values: torch.Tensor, aggregation: str) -> float:
    rows = [values[i, :n] for i, n in enumerate(LENGTHS.tolist())]
    if aggregation == "Token":
        return float(torch.cat(rows).mean())
    if aggregation == "Sequence":
        return float(torch.stack([row.mean() for row in rows]).mean())
    return float(torch.cat(rows).sum() / (4 * 10))


@pytest.mark.parametrize("aggregation", ["Token", "Sequence", "Constant"])
def test_aggregations_are_their_formulas_however_the_mini_batch_is_cut(aggregation: losses.Aggregation) -> None:
    values = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < LENGTHS[:, None]
    tokens = int(LENGTHS.sum())
    for cut in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]):
        total = torch.zeros((), dtype=torch.float64)
        for rows in cut:
            share = losses.aggregation_weights(LENGTHS[rows], aggregation, tokens=tokens, samples=4, longest=10)
            weights = None if share is None else share[:, None].expand(len(rows), 7)
            # A ratio of 1 makes the policy loss minus the advantage.
            zero = torch.zeros_like(values[rows])
            total += policy_loss(zero, zero, -values[rows], mask[rows], normaliser=tokens, weights=weights)[0]
        assert float(total) == pytest.approx(by_hand(values, aggregation))


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="must be Token, Sequence or Constant"):
        losses.aggregation_weights(LENGTHS, "Mean", tokens=1, samples=1, longest=1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_trainers_gradient_does_not_depend_on_micro_batches_and_does_on_the_aggregation() -> None:
    """Through the whole engine: packed, grouped baselines, KL in the loss, entropy bonus."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for aggregation in ("Token", "Sequence", "Constant"):
        for micro in (2, 8):
            sizes = {"globalBatchSize": 8, "miniBatchSize": 8, "microBatchSize": micro, "epochs": 1}
            ppo = {**sizes, "advantage": "grpo", "samplesPerPrompt": 2, "entropyCoef": 0.01}
            settings = job(ppo={**ppo, "lossAggregation": aggregation}, generation={"maxTokens": 10})
            with LocalTrainer(settings) as trainer:
                load = load_command(Stage.PPO)
                trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
                step = trainer.step(Stage.PPO, 1, ppo_batch(1, count=8), ["actor"], 8 // micro, kl_coef=0.3)
                found[aggregation, micro] = trainer.metrics(step)
    for aggregation in ("Token", "Sequence", "Constant"):
        for name in ("policy_loss", "kl_loss", "actor_grad_norm"):
            few, many = found[aggregation, 8][name], found[aggregation, 2][name]
            assert many == pytest.approx(few, rel=1e-4, abs=1e-6), (aggregation, name)
        assert found[aggregation, 2]["kl_loss"] > 0
        assert "reward_with_kl" not in found[aggregation, 2]
    norms = {round(found[aggregation, 2]["actor_grad_norm"], 4) for aggregation in ("Token", "Sequence", "Constant")}
    assert len(norms) == 3


# ---------------------------------------------------------------- clipping


def test_functions_and_foreign_reward_models_are_not_clipped() -> None:
    assert reward_clip(job().spec) == 5.0
    assert reward_clip(job(models={"reward": {"function": "a:b"}}).spec) is None
    foreign = job(stages=["sft", "ppo"], models={"reward": {"source": {"path": "x"}}})
    assert reward_clip(foreign.spec) is None
    several = {"functions": [{"function": "a:b"}, {"function": "a:c"}]}
    assert reward_clip(job(models={"reward": several}).spec) is None
    assert reward_clip(job(models={"reward": {"function": "a:b"}}, ppo={"rewardClip": 2.0}).spec) == 2.0
    assert reward_clip(job(ppo={"rewardClip": None}).spec) is None


def test_scores_of_a_function_keep_their_differences_and_clipped_ones_are_counted() -> None:
    arrays = unpack(ppo_batch(1))
    arrays["scores"] = np.linspace(10, 99, 16).astype(np.float32)
    batch = unpack(pack(arrays))
    config = PPO(advantage="rloo", samples_per_prompt=2)
    free = targets(PPOSamples.read(batch, config), config, 0.0, None)
    assert free.metrics["advantage_std"] > 1.0
    assert free.metrics["reward_clipped"] == 0.0
    config = PPO(advantage="rloo", samples_per_prompt=2, reward_clip=5.0)
    flat = targets(PPOSamples.read(batch, config), config, 0.0, None)
    assert flat.metrics["advantage_std"] == 0.0
    assert flat.metrics["reward_clipped"] == 1.0
