"""Adapters on experts are peft's own: same logits, gradients, merged weights and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.model_families.support import target_problem
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import Dtype, LoRA, Parallelism
from dovetail.models import ModelError, PipelineStage, load_config
from dovetail.models.build import fill, open_source
from dovetail.models.derive import usual_config
from dovetail.models.source import in_files
from dovetail.planner.memory import Training, trained_parameters, training_memory
from dovetail.protocol.messages import ModelRef
from dovetail.tools.model_check import small_copy
from dovetail.trainer.engine import lora
from dovetail.trainer.engine.action_measures import SavedBytes
from dovetail.trainer.engine.split_backward import backward_input, backward_weights

pytestmark = pytest.mark.slow
PREFIX = "base_model.model."
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTERS = LoRA(rank=3, alpha=6.0, target_modules=["q_proj", *EXPERTS])
TOKENS = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0))


def folder_of(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = small_copy(usual_config(kind), MODEL_FAMILIES[kind])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def stage_of(folder: Path, adapters: LoRA = ADAPTERS, stages: int = 1) -> PipelineStage:
    """The last one of `stages`, with adapters that change what it computes."""
    ref = ModelRef(head="lm", path=str(folder))
    stage = PipelineStage(load_config(ref), "lm", stages - 1, stages)
    lora.inject(stage, adapters)
    stage.to_empty(device="cpu")
    named = {n: plain for n, _ in stage.named_parameters() if (plain := lora.plain_name(n)) is not None}
    fill(stage, open_source(ref, stage), named)
    lora.initialise(stage, 1)
    stage.place_buffers("cpu")
    draw = torch.Generator().manual_seed(2)
    for name, parameter in stage.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.3, generator=draw)
    return stage


def loss(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1)[..., 7].sum()


# Experts whose matrices are transposed and have biases, and layers without experts and shared experts.
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_experts_train_as_peft_s_own(kind: str, tmp_path: Path) -> None:
    base = folder_of(kind, tmp_path / "base")
    stage = stage_of(base)
    described = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=EXPERTS, bias="none")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    theirs: Any = get_peft_model(model, described)
    mine = dict(stage.named_parameters())
    trained = {name.removeprefix(PREFIX): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert set(trained) == {name for name, p in mine.items() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.data.copy_(mine[name])
    logits, wanted = stage(TOKENS, (20,)), theirs(TOKENS, use_cache=False).logits
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    for each in (logits, wanted):
        loss(each).backward()
    for name, parameter in trained.items():
        torch.testing.assert_close(mine[name].grad, parameter.grad, atol=1e-3, rtol=1e-3)
    merged = dict(in_files(stage.family, lora.merged(stage, list(mine), lambda name: mine[name].detach())))
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    assert expected.keys() <= merged.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=1e-5)


def test_both_halves_of_a_backward_give_its_gradients(tmp_path: Path) -> None:
    stage = stage_of(folder_of("qwen3_moe", tmp_path), stages=2)
    trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
    inputs = torch.randn(1, 20, stage.hidden_size, requires_grad=True)
    of_inputs, *wanted = torch.autograd.grad(loss(stage(inputs, (20,))), [inputs, *trained.values()])
    found, weights = backward_input(loss(stage(inputs, (20,))), None, inputs)
    torch.testing.assert_close(found, of_inputs)
    assert all(parameter.grad is None for parameter in trained.values())
    backward_weights(weights)
    for (name, parameter), gradient in zip(trained.items(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=name)


def test_files_of_adapters_are_peft_s(tmp_path: Path) -> None:
    base = folder_of("qwen3_moe", tmp_path / "base")
    stage = stage_of(base)
    named = {n: p.detach() for n, p in stage.named_parameters() if p.requires_grad}
    save_file({f"{PREFIX}{lora.saved_name(n)}": p for n, p in named.items()}, tmp_path / "adapter_model.safetensors")
    lora.described(stage, ADAPTERS, task_type="CAUSAL_LM").save_pretrained(str(tmp_path))
    model = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path)
    torch.testing.assert_close(model(TOKENS).logits, stage(TOKENS, (20,)), atol=1e-4, rtol=1e-4)


def test_what_cannot_have_adapters_is_refused(tmp_path: Path) -> None:
    family = MODEL_FAMILIES["qwen3_moe"]
    assert target_problem(EXPERTS, 0.0, family) is None
    assert "experts.down_proj have no dropout; set lora.dropout to 0" in str(target_problem(EXPERTS, 0.1, family))
    assert "no layer is called 'gate_up_proj'" in str(target_problem(["gate_up_proj"], 0.0, family))
    assert "no layer is called 'experts.down_proj'" in str(target_problem(EXPERTS[1:], 0.0, MODEL_FAMILIES["llama"]))
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj, experts\.down_proj"):
        stage_of(folder_of("qwen3_moe", tmp_path), LoRA(target_modules=["gate_up_proj"]))


def test_the_planner_counts_them(tmp_path: Path) -> None:
    base = folder_of("qwen3_moe", tmp_path)
    kept = {}
    for adapters in (LoRA(rank=1, target_modules=["q_proj"]), ADAPTERS.model_copy(update={"rank": 1})):
        stage = stage_of(base, adapters)
        shape = ModelShape.of(stage.config.to_dict())
        job = Training(shape, "lm", Parallelism(), Dtype.FLOAT32, 20, lora=adapters, gpu=False)
        trained = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        assert trained_parameters(job, 0)[1] == trained
        with SavedBytes(stage.parameters()) as meter:
            stage.train()(TOKENS, (20,))
        kept[len(adapters.target_modules)] = meter.bytes, training_memory(job, 0).device["activations"]
    (few, counted_few), (all_, counted) = kept[1], kept[3]
    # Weights that are trained need the inputs of the experts, too. The planner counts these in any case.
    inputs = 4 * shape.layers * 20 * shape.chosen * (shape.hidden + shape.intermediate)
    assert counted - counted_few + inputs == pytest.approx(all_ - few, rel=0.01)
