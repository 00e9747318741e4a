"""Routing replay: a trainer that is told which experts the rollout chose uses these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.manifest.types import ScratchModel, Stage
from dovetail.models import PipelineStage, build_stage
from dovetail.models.layers.expert_routing import take_counts, take_unbalance
from dovetail.models.recompute import recompute
from dovetail.protocol.messages import Load, ModelRef
from dovetail.protocol.wire import pack, unpack
from dovetail.trainer.engine.split_backward import backward_input, backward_weights
from helpers.family_models import ref
from helpers.lazy import Lazy
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import VOCABULARY, job, load_command, ppo_batch

qwen3_moe = Lazy("transformers.models.qwen3_moe.modeling_qwen3_moe")
FAMILIES = ("qwen3_moe", "gpt_oss")
LENGTHS = (7, 4)


def choices(stages: list[PipelineStage]) -> list[Tensor]:
    """What each layer's router chooses in the passes that follow, (tokens, 2)."""
    found: list[Tensor] = []
    for stage in stages:
        for layer in stage.body.layers.values():
            router = layer.get_submodule(stage.family.experts.router)
            router.register_forward_hook(lambda _module, _inputs, output: found.append(output[2]))
    return found


def run(stages: list[PipelineStage], tokens: Tensor, routing: Tensor | None) -> Tensor:
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden, LENGTHS, routing=routing)
    return hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_the_given_experts_are_used(family: str) -> None:
    tokens = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    whole = [build_stage(ref(family, initializer_range=0.5)).requires_grad_(True)]
    used = choices(whole)
    plain = run(whole, tokens, None)
    own = torch.stack(used, 1)
    assert take_counts(whole[0]) == (0.0, 0.0)
    # The router's own choice changes nothing, and where none is given it is taken.
    for given in (own, torch.full_like(own, -1)):
        assert torch.equal(run(whole, tokens, given), plain)
    assert take_counts(whole[0]) == (0.0, own.numel())
    # Others are used, with one pipeline stage and with two, and with layers that run again in the backward pass.
    other = own.clone()
    other[3:5, 2] = (own[3:5, 2] + 1) % 4
    differ = int((own[3:5, 2].unsqueeze(2) != other[3:5, 2].unsqueeze(1)).all(2).sum())
    used.clear()
    changed = run(whole, tokens, other)
    assert torch.equal(torch.stack(used, 1), other)
    assert take_counts(whole[0]) == (differ, own.numel())
    torch.testing.assert_close(changed[:, :3], plain[:, :3])
    assert not torch.allclose(changed[:, 3:5], plain[:, 3:5])
    changed.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in whole[0].named_parameters()}
    halves = [build_stage(ref(family, initializer_range=0.5), rank, 2).requires_grad_(True).train() for rank in (0, 1)]
    for half in halves:
        recompute(half)
    found = run(halves, tokens, other)
    torch.testing.assert_close(found, changed)
    found.square().mean().backward()
    for half in halves:
        for name, parameter in half.named_parameters():
            if half.checkpoint_name(name) == name:
                torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


MOE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}


def load() -> Load:
    scratch = ScratchModel(architecture="qwen3_moe", config=MOE)
    base = load_command(Stage.PPO)
    return base.model_copy(update={"models": {**base.models, "actor": ModelRef(head="lm", scratch=scratch, seed=0)}})


@pytest.mark.slow
def test_a_ppo_step_replays_and_says_what_differs() -> None:
    arrays = unpack(ppo_batch(1))
    shape = (*arrays["tokens"].shape, 2, 2)
    given = np.stack([np.zeros(shape[:-1], np.int16), np.ones(shape[:-1], np.int16)], -1)
    changes: dict[str, float] = {}
    losses = []
    for name, routing in (("none", None), ("unknown", np.full(shape, -1, np.int16)), ("given", given)):
        batch = pack(arrays if routing is None else {**arrays, "routed_experts": routing})
        with LocalTrainer(job()) as trainer:
            trainer.metrics(load())
            metrics = trainer.metrics(trainer.step(Stage.PPO, 1, batch, ["actor", "critic"], 4, kl_coef=0.05))
        changes[name] = metrics.get("routing_differs", -1.0)
        losses.append((metrics["mismatch_abs"], metrics["policy_loss"]))
    assert losses[0] == losses[1] != losses[2]
    assert changes["none"] == changes["unknown"] == -1.0
    # Two of four experts at random: half of them are others.
    assert 0.3 < changes["given"] < 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routing", "sentence"),
    [
        (np.zeros((3, 2), np.int16), "layers and experts a token"),
        (np.full((2, 2), 4, np.int16), "holds expert 4, which is none"),
    ],
)
def test_experts_that_are_not_there(routing: np.ndarray, sentence: str) -> None:
    arrays = unpack(ppo_batch(1))
    routed = np.broadcast_to(routing, (*arrays["tokens"].shape, *routing.shape)).copy()
    batch = pack({**arrays, "routed_experts": routed})
    with LocalTrainer(job()) as trainer:
        trainer.metrics(load())
        result = trainer.execute(trainer.step(Stage.PPO, 1, batch, ["actor", "critic"], 4, kl_coef=0.05))
    assert sentence in str(result.error)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_load_balancing_loss_is_transformers_own_of_each_layer(family: str) -> None:
    """Its value and its gradients: on packed rows, over stages, with activation checkpointing, in a split backward."""
    tokens = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    whole = build_stage(ref(family, initializer_range=0.5)).requires_grad_(True).train()
    logits: list[Tensor] = []
    hooks = [
        layer.get_submodule(whole.family.experts.router).register_forward_hook(
            lambda _module, _inputs, output: logits.append(output[0])
        )
        for layer in whole.body.layers.values()
    ]
    output = run([whole], tokens, None)
    wanted = torch.stack([qwen3_moe.load_balancing_loss_func((each,), 4, 2) for each in logits]).mean()
    (output.square().mean() + 0.1 * wanted).backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for hook in hooks:
        hook.remove()
    halves = [build_stage(ref(family, initializer_range=0.5), rank, 2).requires_grad_(True).train() for rank in (0, 1)]
    recompute(halves[0])
    sent = halves[0](tokens, LENGTHS, balance=0.1)
    arrived = sent.detach().requires_grad_(True)
    last_output = halves[1](arrived, LENGTHS, balance=0.1)
    torch.testing.assert_close(last_output, output)
    # The second stage's backward pass in two halves.
    gradient, groups = backward_input(last_output.square().mean(), None, arrived)
    sent.backward(gradient)
    backward_weights(groups)
    found = [take_unbalance(half) for half in halves]
    layers = len(logits)
    # A layer that runs again for its backward pass is counted twice.
    assert sum(passes for _, passes in found) > layers
    last = [qwen3_moe.load_balancing_loss_func((each.detach(),), 4, 2) for each in logits[-found[1][1] :]]
    assert found[1][0] == pytest.approx(float(sum(last)))
    for half in halves:
        for name, parameter in half.named_parameters():
            if half.checkpoint_name(name) == name:
                torch.testing.assert_close(parameter.grad, gradients[name], msg=name)
    assert take_unbalance(halves[0]) == (0.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["whole", "adapters"])
def test_a_ppo_step_with_a_load_balancing_loss(layout: str) -> None:
    """Routers change with it, and what the policy loss does not see is reported."""
    found = {}
    for coefficient in (0.0, 10.0):
        actor: dict[str, Any] = {"source": {"scratch": {}}, "routerAuxLossCoef": coefficient}
        if layout == "adapters":
            actor["lora"] = {"rank": 2}
        with LocalTrainer(job(models={"actor": actor})) as trainer:
            trainer.metrics(load())
            found[coefficient] = trainer.metrics(
                trainer.step(Stage.PPO, 1, ppo_batch(1), ["actor", "critic"], 4, kl_coef=0.05)
            )
    assert "router_aux_loss" not in found[0.0]
    # Two of four experts, all used alike: 2.
    assert 1.9 < found[10.0]["router_aux_loss"] < 8
    assert found[10.0]["mismatch_abs"] == found[0.0]["mismatch_abs"]
    assert found[10.0]["actor_grad_norm"] > 1.5 * found[0.0]["actor_grad_norm"]
