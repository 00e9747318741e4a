"""A value head on the actor's body (AC-share): one loss, one optimizer, and two heads that part ways on export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.models import Outputs, build_stage
from dovetail.models.model_stage import VALUE_HEAD_FILE
from dovetail.protocol.messages import Export, Load, ModelRef, Save
from dovetail.protocol.wire import Arrays, pack, unpack
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import TINY, job, load_command, ppo_batch

SHARED = {"critic": {"shareActorBody": True}}


def batch() -> bytes:
    arrays = unpack(ppo_batch(1))
    del arrays["values"]
    return pack(arrays)


def load(**changes: Any) -> Load:
    ref = ModelRef(head="lm+value", scratch=TINY, seed=0)
    return load_command(Stage.PPO).model_copy(update={"models": {"actor": ref}, **changes})


def step(trainer: LocalTrainer, micro_batches: int = 4, **fields: Any) -> Any:
    number = trainer.runner.step + 1
    return trainer.step(Stage.PPO, number, batch(), ["actor"], micro_batches, kl_coef=0.05, **fields)


def parameters(trainer: LocalTrainer) -> dict[str, Tensor]:
    trainer.runner.engine.settle()
    return {n: p.detach().clone() for n, p in trainer.runner.engine.models["actor"].module.named_parameters()}


# ---------------------------------------------------------------- the joint loss


def sequence(stage: Any, arrays: Arrays, row: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a sample's response tokens, and the values of the states in which they were chosen."""
    prompt, response = int(arrays["prompt_lengths"][row]), int(arrays["response_lengths"][row])
    tokens = torch.from_numpy(arrays["tokens"][row : row + 1, : prompt + response]).long()
    output = stage(tokens)
    where = slice(prompt - 1, prompt + response - 1)
    logprobs = output.logits[0, where].float().log_softmax(-1)
    return logprobs.gather(1, tokens[0, prompt:, None])[:, 0], output.values[0, where]


def recursion(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE from the last token on (Schulman et al. 2016, equation 16)."""
    advantages, last, following = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = float(rewards[t]) + gamma * following - float(values[t])
        last = delta + gamma * lam * last
        advantages[t], following = last, float(values[t])
    return advantages


def joint_gradient(stage: Any, arrays: Arrays, spec: RLHFJobSpec, coef: float) -> dict[str, Tensor]:
    """Of policy loss + coef x value loss over the whole batch, sample by sample, as the papers write them."""
    ppo, rows = spec.ppo, range(len(arrays["scores"]))
    before = []
    with torch.no_grad():
        for row in rows:
            logprobs, values = sequence(stage, arrays, row)
            reference = torch.from_numpy(arrays["ref_logprobs"][row, : len(logprobs)])
            rewards = -0.05 * (logprobs - reference)
            rewards[-1] += float(arrays["scores"][row])
            advantages = recursion(rewards, values, ppo.gamma, ppo.lam)
            before.append((logprobs, values, advantages, advantages + values))
    everything = torch.cat([advantages for _, _, advantages, _ in before])
    mean, spread = everything.mean(), everything.var()
    total = torch.zeros(())
    for row, (old, old_values, advantages, returns) in zip(rows, before, strict=True):
        logprobs, values = sequence(stage, arrays, row)
        white = (advantages - mean) / (spread + 1e-8).sqrt()
        rollout = torch.from_numpy(arrays["rollout_logprobs"][row, : len(old)])
        weight = (old - rollout).exp().clamp(max=ppo.importance_sampling.cap)
        ratio = (logprobs - old).exp()
        surrogate = torch.minimum(ratio * white, ratio.clamp(1 - ppo.clip, 1 + ppo.clip) * white)
        assert ppo.value_clip is not None
        kept = old_values + (values - old_values).clamp(-ppo.value_clip, ppo.value_clip)
        squared = torch.maximum((values - returns) ** 2, (kept - returns) ** 2)
        total = total - (weight * surrogate).sum() + coef * 0.5 * squared.sum()
    (total / len(everything)).backward()
    return {name: p.grad for name, p in stage.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("coef", [None, 0.7])
def test_gradient_of_the_joint_loss(coef: float | None) -> None:
    ppo: dict[str, Any] = {"miniBatchSize": 16, "epochs": 1, "rewardClip": None, "valueCoef": coef}
    ppo["actorOptimizer"] = {"learningRate": 1e-4, "maxGradNorm": 1e6, "warmupFraction": 0.0}
    settings = job(models=SHARED, ppo=ppo)
    arrays = unpack(batch())
    reference = build_stage(ModelRef(head="lm+value", scratch=TINY, seed=0)).requires_grad_(True)
    head = torch.randn(reference.score.weight.shape, generator=torch.Generator().manual_seed(3))
    with LocalTrainer(settings) as trainer:
        trainer.metrics(load())
        held = trainer.runner.engine.models["actor"]
        for weight in (reference.score.weight, held.module.score.weight):
            weight.detach().copy_(head)
        metrics = trainer.metrics(step(trainer, 8))
        trainer.runner.engine.settle()
        # After one step of Adam the first moment is (1 - beta1) times the gradient.
        found = {name: first / (1 - 0.9) for name, (first, _) in held.optimizer.moments.items()}
    expected = joint_gradient(reference, arrays, settings.spec, 0.1 if coef is None else coef)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert metrics["value_loss"] > 0
    assert "critic_grad_norm" not in metrics


@pytest.mark.slow
def test_values_are_learnt_without_any_in_the_batch() -> None:
    with LocalTrainer(job(models=SHARED, ppo={"ptxCoef": 0.1, "entropyCoef": 0.01})) as trainer:
        trainer.metrics(load())
        before = parameters(trainer)
        losses = []
        for _ in range(8):
            arrays = unpack(ppo_batch(1, ptx=8))
            del arrays["values"]
            number = trainer.runner.step + 1
            metrics = trainer.metrics(trainer.step(Stage.PPO, number, pack(arrays), ["actor"], 4, kl_coef=0.0))
            losses.append(metrics["value_loss"])
        after = parameters(trainer)
    assert losses[-1] < 0.8 * losses[0]
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert metrics["explained_variance"] > 0
    assert metrics["ptx_loss"] > 0


@pytest.mark.slow
def test_the_size_of_micro_batches_changes_nothing_but_rounding() -> None:
    found = []
    for size in (1, 8):
        with LocalTrainer(job(models=SHARED, ppo={"epochs": 1, "microBatchSize": size})) as trainer:
            trainer.metrics(load())
            metrics = trainer.metrics(step(trainer, 8 // size))
        found.append({k: v for k, v in metrics.items() if k not in ("seconds", "activation_peak_bytes")})
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_critic_cannot_train_alone() -> None:
    with LocalTrainer(job(models=SHARED)) as trainer:
        trainer.metrics(load())
        result = trainer.execute(step(trainer, train_actor=False))
        assert "the critic shares the actor's body" in str(result.error)
        trainer.metrics(step(trainer))


# ---------------------------------------------------------------- weights


def test_two_heads_on_one_body() -> None:
    tokens = torch.randint(1, 64, (2, 7))
    both = build_stage(ModelRef(head="lm+value", scratch=TINY, seed=4))
    output = both(tokens)
    assert isinstance(output, Outputs)
    assert torch.equal(output.logits, build_stage(ModelRef(head="lm", scratch=TINY, seed=4))(tokens))
    assert torch.equal(output.values, torch.zeros(2, 7)), "a head without a source starts at zero"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_export_parts_the_heads_and_a_later_job_finds_them(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    models: dict[str, Any] = SHARED | {"actor": {"source": {"scratch": TINY.model_dump(by_alias=True)}, "lora": lora}}
    tokens = torch.randint(1, 64, (2, 7))
    with LocalTrainer(job(models=models, ppo={"ema": 0.9})) as trainer:
        trainer.metrics(load())
        trainer.metrics(step(trainer))
        for name in ("actor", "ema"):
            trainer.metrics(Export(id=name, model=name, path=str(tmp_path / name)))  # type: ignore[arg-type]
        engine = trainer.runner.engine
        with torch.no_grad():
            output = engine.models["actor"].module(tokens)
        sent = [part.name for part in engine.sendable("actor", 1).iterate()]  # type: ignore[union-attr]
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "actor", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(loaded(tokens).logits, output.logits, rtol=1e-4, atol=1e-5)
    # Rollouts get what transformers knows, and nothing else.
    assert set(sent) == set(loaded.state_dict()) - ({"lm_head.weight"} if loaded.config.tie_word_embeddings else set())
    assert [f.name for f in (tmp_path / "actor").glob("*.safetensors")] == ["model.safetensors"]

    again = build_stage(ModelRef(head="lm+value", path=str(tmp_path / "actor")))(tokens)
    torch.testing.assert_close(again.values, output.values, rtol=1e-4, atol=1e-5)
    average = build_stage(ModelRef(head="lm+value", path=str(tmp_path / "ema")))(tokens).values
    assert 0 < float(average.norm()) < float(output.values.norm()), "the average lags behind"
    # The head belongs to the value estimates alone: a reward model that starts from the folder starts at zero.
    assert not build_stage(ModelRef(head="value", path=str(tmp_path / "actor")))(tokens).any()
    assert (tmp_path / "actor" / VALUE_HEAD_FILE).is_file()


@pytest.mark.slow
def test_a_checkpoint_brings_back_both_heads_and_their_moments(tmp_path: Path) -> None:
    with LocalTrainer(job(models=SHARED, ppo={"ema": 0.9})) as trainer:
        trainer.metrics(load())
        trainer.metrics(step(trainer))
        trainer.metrics(Save(id="save", path=str(tmp_path / "one")))
        trainer.metrics(step(trainer))
        expected = parameters(trainer)
        trainer.metrics(load(checkpoint=str(tmp_path / "one")))
        trainer.metrics(step(trainer))
        found = parameters(trainer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert expected["score.weight"].any()
