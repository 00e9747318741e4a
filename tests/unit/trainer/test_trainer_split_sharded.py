"""Stages that FSDP2 holds: split backwards give the gradients of whole ones, bit by bit, and what no training changes
stays float32."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dovetail.manifest.types import ScratchModel
from dovetail.models import Outputs, PipelineStage, build_stage
from dovetail.models.model_stage import Head
from dovetail.protocol.messages import ModelRef
from dovetail.trainer.engine.parallel import is_sharded, set_last_backward, shard, take_gradients, take_split_gradients
from dovetail.trainer.engine.split_backward import backward_input, backward_weights

HIDDEN, COUNT = 32, 4
CONFIG = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CPU, COMPUTE = torch.device("cpu"), torch.bfloat16


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def gradients(rank: int, mesh: DeviceMesh, order: str, head: Head, alone: bool) -> dict[str, torch.Tensor]:
    """Of two mini-batches' sum on stage `rank` of 3; `order`: B, or I and W of the micro-batches of one. `alone`: as a
    rank that has nobody to reduce with, though FSDP2 could."""
    scratch = ScratchModel(architecture="llama", config=CONFIG)
    stage: PipelineStage = build_stage(ModelRef(head=head, scratch=scratch, seed=5), rank, 3)
    if head == "lm+value":
        stage.score.weight.fill_(0.1)  # from scratch it is zero
    stage.requires_grad_(True).train()
    groups: Any = SimpleNamespace(tp_size=1, dp_mesh=mesh["dp"])
    shard(stage, groups, COMPUTE, CPU)
    assert is_sharded(stage)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        set_last_backward(stage, False, alone)
        saved = []
        for _ in range(COUNT):
            hidden = torch.randn(1, 7, HIDDEN, generator=generator).to(COMPUTE).requires_grad_(True)
            output = stage(hidden)
            if isinstance(output, Outputs):
                output = output.logits.float().logsumexp(-1).sum() + output.values.square().sum()
            saved.append((hidden, output, torch.randn(output.shape, generator=generator).to(output.dtype)))
        halves, done = {}, dict.fromkeys("BIW", 0)
        for kind in order:
            number = done[kind]
            done[kind] += 1
            last = number == COUNT - 1
            hidden, output, gradient = saved[number]
            if kind == "B":
                set_last_backward(stage, last, alone)
                torch.autograd.backward(output, gradient)
            elif kind == "I":
                _, halves[number] = backward_input(output, gradient, hidden)
            else:
                backward_weights(halves.pop(number))
                take_split_gradients(stage, COMPUTE, last, alone)
        if alone:
            take_gradients(stage)
    found: dict[str, Any] = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in found.items()}


@pytest.mark.parametrize(("rank", "head"), [(1, "lm"), (2, "lm"), (2, "lm+value")])
@pytest.mark.parametrize(
    ("order", "alone"),
    [("IWIWIWIW", False), ("IIIIWWWW", False), ("IIWIWIWW", False), ("IIWIWIWW", True), ("BBBB", True)],
)
def test_split_backwards_of_sharded_stages_give_the_same_bits(
    mesh: DeviceMesh, rank: int, head: Head, order: str, alone: bool
) -> None:
    whole, halves = gradients(rank, mesh, "BBBB", head, False), gradients(rank, mesh, order, head, alone)
    assert whole.keys() == halves.keys()
    assert all(bool(value.abs().max() > 0) for value in whole.values())
    for name, value in whole.items():
        assert torch.equal(value, halves[name]), name


def test_what_no_training_changes_is_float32_in_sharded_passes(mesh: DeviceMesh) -> None:
    """A router's bias that only chooses experts. Rounded, it would choose others than vLLM's."""
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    }
    config = {**CONFIG, **experts, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    scratch = ScratchModel(architecture="glm4_moe", config=config)
    stage = build_stage(ModelRef(head="lm", scratch=scratch, seed=5))
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name not in stage.constants)
    groups: Any = SimpleNamespace(tp_size=1, dp_mesh=mesh["dp"])
    shard(stage, groups, COMPUTE, CPU)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for number in (1, 2):
        router: Any = stage.body.layers[str(number)].mlp.gate
        router.e_score_correction_bias.data.fill_(1 + 2**-20)
        router.register_forward_pre_hook(
            lambda gate, inputs: seen.append((gate.e_score_correction_bias.dtype, inputs[0].dtype))
        )
    set_last_backward(stage, True, False)
    stage(torch.arange(7)[None]).float().logsumexp(-1).sum().backward()
    assert seen == [(torch.float32, COMPUTE)] * 2
    assert all((p.grad is None) == (name in stage.constants) for name, p in stage.named_parameters())
    assert all(bool((stage.get_parameter(name) == 1 + 2**-20).all()) for name in stage.constants)
