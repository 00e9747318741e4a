"""Losses of the user's (`spec.ppo.loss`): the same door as the built-in ones, exact however a batch is cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.manifest.base import LOSSES
from dovetail.manifest.callables import FunctionError
from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import Stage
from dovetail.trainer.algorithms import policy
from dovetail.trainer.main import serve
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, ppo_batch

MINE = """
import torch


def same_as_ppo(inputs):
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20)
    ratio = log_ratio.exp()
    low, high = 1 - inputs.config.clip, 1 + inputs.config.clip
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(low, high))
    return losses, {"ratio": ratio, "sample": inputs.sequence_ids.float()}


def by_sample(inputs):
    return -inputs.advantages * inputs.sequence_mean(inputs.logprobs - inputs.old_logprobs).exp()


def total(inputs):
    return inputs.logprobs.sum()


def text(inputs):
    return "loss"


def endless(inputs):
    return inputs.logprobs / 0.0


def frozen(inputs):
    return inputs.old_logprobs


def steep(inputs):
    return (inputs.logprobs - inputs.logprobs.detach()).abs().sqrt()


def broken(inputs):
    return inputs.no_such_field


def bad_metric(inputs):
    return inputs.logprobs, {"mean": inputs.logprobs.mean()}


def later(inputs):
    if len(inputs.tokens) == 6:
        return inputs.logprobs
    return inputs.logprobs * float("nan")


def polls(inputs):
    import time

    while True:
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a module `my_losses`."""
    (tmp_path / "my_losses.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    return str(tmp_path)


def metrics(folder: str, loss: str | None, micro: int = 2, steps: int = 1, **ppo: Any) -> dict[str, float]:
    """What an iteration of an actor alone reports."""
    sizes = {"globalBatchSize": 16, "miniBatchSize": 8, "microBatchSize": micro, "epochs": 1}
    fields = {**sizes, "advantage": "grpo", "samplesPerPrompt": 2, "entropyCoef": 0.01, **ppo}
    if loss is not None:
        fields |= {"loss": loss, "importPath": folder}
    with LocalTrainer(job(ppo=fields, generation={"maxTokens": 10})) as trainer:
        load = load_command(Stage.PPO)
        trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
        for step in range(1, steps + 1):
            found = trainer.metrics(trainer.step(Stage.PPO, step, ppo_batch(step), ["actor"], 8 // micro, kl_coef=0.3))
    return {name: value for name, value in found.items() if name not in ("seconds", "activation_peak_bytes")}


def test_the_manifest_names_the_losses_that_the_trainer_has() -> None:
    assert tuple(policy.LOSSES) == LOSSES


@pytest.mark.slow
def test_a_users_loss_with_the_same_arithmetic_gives_the_same_bits(module: str) -> None:
    built_in, mine = metrics(module, None, steps=2), metrics(module, "my_losses:same_as_ppo", steps=2)
    own = {name: mine.pop(name) for name in list(mine) if name.startswith("loss/")}
    assert mine == {name: value for name, value in built_in.items() if not name.endswith("clipfrac")}
    assert own.keys() == {"loss/ratio", "loss/sample"}
    assert own["loss/ratio"] == mine["ratio"]
    assert 0 < own["loss/sample"] < 1, "two samples a micro-batch"


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["Token", "Sequence", "Constant"])
def test_its_gradient_does_not_depend_on_micro_batches(module: str, aggregation: str) -> None:
    few, many = (
        metrics(module, "my_losses:by_sample", micro, lossAggregation=aggregation, advantage="grpo") for micro in (8, 2)
    )
    for name in ("policy_loss", "kl_loss", "actor_grad_norm"):
        assert many[name] == pytest.approx(few[name], rel=1e-4, abs=1e-6), name
    assert few["policy_loss"] != 0


def test_a_mean_over_a_sample_skips_what_does_not_count() -> None:
    inputs = policy.LossInputs(
        *(torch.tensor(x) for x in ([5, 5, 5, 5], [0, 0, 2, 2], [True, True, True, False])),
        *(torch.zeros(4) for _ in range(6)),
        config=PPO(),
        kl_coef=0.0,
        samples=3,
    )
    assert inputs.sequence_mean(torch.tensor([1.0, 3.0, 5.0, 9.0])).tolist() == [2.0, 2.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("my_losses:missing", "has no 'missing'"),
        ("my_losses:total", r"returned losses of shape \(\); return one number a token, \(6,\)"),
        ("my_losses:text", "returned losses as str"),
        ("my_losses:endless", "returned losses that are not finite"),
        ("my_losses:frozen", "returned losses without a gradient; compute them from inputs.logprobs"),
        ("my_losses:steep", "has a gradient that is not finite"),
        ("my_losses:broken", r"raised AttributeError: .*no_such_field.* at .*my_losses.py:\d+ in broken"),
        ("my_losses:polls", r"did not return within 1 s \(spec.ppo.timeoutSeconds\) at .*my_losses.py:\d+ in polls"),
        ("my_losses:bad_metric", r"returned the metric 'mean' of shape \(\)"),
    ],
)
def test_what_is_wrong_shows_before_a_rank_joins(module: str, loss: str, message: str) -> None:
    env: Any = type("Env", (), {"coordinator": "http://127.0.0.1:1", "token": "", "name": "trainer-0"})
    wrong = job(ppo={"loss": loss, "importPath": module, "timeoutSeconds": 1.0 if "polls" in loss else 600})
    with pytest.raises(ValueError, match=f"^spec.ppo.loss: .*{message}"):
        serve(env, wrong, {}, 1.0, lambda *_, **__: None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_fails_in_a_step_is_the_commands_error(module: str) -> None:
    with LocalTrainer(job(ppo={"loss": "my_losses:later", "importPath": module})) as trainer:
        trainer.metrics(load_command(Stage.PPO))
        result = trainer.execute(trainer.step(Stage.PPO, 1, ppo_batch(1), ["actor", "critic"], 4, kl_coef=0.05))
    assert result.error is not None
    assert result.error.startswith("spec.ppo.loss: my_losses:later returned losses that are not finite")


def test_out_of_memory_in_a_loss_is_told_as_such(module: str) -> None:
    def full(inputs: policy.LossInputs) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    inputs = policy.LossInputs(
        *(torch.ones(1, dtype=d) for d in (torch.int64, torch.int64, torch.bool)),
        *(torch.zeros(1) for _ in range(6)),
        config=PPO(),
        kl_coef=0.0,
        samples=1,
    )
    with pytest.raises(torch.OutOfMemoryError):
        policy.PolicyLoss("a:b", full)(inputs)
    with pytest.raises(FunctionError, match="a:b raised RuntimeError: no"):
        policy.PolicyLoss("a:b", lambda _: (_ for _ in ()).throw(RuntimeError("no")))(inputs)
