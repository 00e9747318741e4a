"""Sizes of models and memory of ranks: against the models themselves, by hand, and how they grow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.model_shape import ModelShape, ShapeError
from dovetail.manifest.types import Dtype, LoRA, Parallelism
from dovetail.models import PipelineStage, load_config
from dovetail.planner.candidate import Share
from dovetail.planner.memory import (
    GPUMemoryModel,
    Training,
    shortage,
    trained_parameters,
    training_memory,
)
from dovetail.planner.workload import Workload
from dovetail.protocol.budgets import OFFLOAD_NUMBERS
from dovetail.protocol.messages import ModelRef
from dovetail.trainer.engine import lora
from dovetail.trainer.profile.pass_times import measure_model

GIB = 2**30
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama"},
    "llama, biases, tied": {
        **SMALL,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2": {**SMALL, "model_type": "qwen2"},
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "opt": {**SMALL, "model_type": "opt", "ffn_dim": 160, "word_embed_proj_dim": 64},
    "opt, narrow embedding": {**SMALL, "model_type": "opt", "ffn_dim": 160, "word_embed_proj_dim": 32},
    "mistral": {**SMALL, "model_type": "mistral", "sliding_window": 8},
    "gemma2": {**SMALL, "model_type": "gemma2", "head_dim": 24},
    "gemma3_text": {**SMALL, "model_type": "gemma3_text", "head_dim": 24, "tie_word_embeddings": False},
    "qwen3_moe": {
        **SMALL,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
    },
    "phi3": {**SMALL, "model_type": "phi3", "pad_token_id": 0},
    "gpt_neox": {**SMALL, "model_type": "gpt_neox"},
    "gpt_oss": {**SMALL, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
}
# Published: the models' cards.
PUBLISHED = {
    "llama 7B": ({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}, 32, 32000, 6_738_415_616),
    "llama 65B": (
        {"hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 80},
        64,
        32000,
        65_285_660_672,
    ),
}


def shape_of(hidden: int = 4096, layers: int = 32) -> ModelShape:
    inner = hidden * 43 // 16
    return ModelShape("llama", layers, hidden, inner, hidden // 128, hidden // 128, 128, 32000)


def reference(folder: Path, config: dict[str, Any], head: str = "lm") -> ModelRef:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelRef.model_validate({"path": str(folder), "head": head})


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, "lm") for name in CONFIGS),
        *(pytest.param(n, "value", marks=() if n.startswith("llama") else pytest.mark.nightly) for n in CONFIGS),
    ],
)
def test_parameters_are_those_of_the_stages_that_are_trained(tmp_path: Path, name: str, head: Any) -> None:
    config = load_config(reference(tmp_path, CONFIGS[name], head))
    shape = ModelShape.of(CONFIGS[name])
    for pp, chunks in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        job = Training(shape, head, Parallelism(pp=pp), Dtype.FLOAT32, 64, chunks=chunks)
        for stage in range(pp):
            module = PipelineStage(config, head, stage, pp, chunks)
            count = sum(p.numel() for p in module.parameters())
            assert trained_parameters(job, stage) == (count, count), (name, head, pp, chunks, stage)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj", "down_proj"]),
        ("gemma3_text", ["q_proj", "down_proj"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("gpt_neox", ["query_key_value", "dense_4h_to_h"]),
        ("qwen3_moe", ["q_proj", "o_proj"]),  # experts and routers stay frozen
    ],
)
def test_adapters_are_counted_as_they_are_injected(tmp_path: Path, name: str, targets: list[str]) -> None:
    config = load_config(reference(tmp_path, CONFIGS[name], "value"))
    for adapter in (LoRA(rank=4), LoRA(rank=2, target_modules=targets)):
        module = PipelineStage(config, "value", 1, 2)
        lora.inject(module, adapter)
        job = Training(ModelShape.of(CONFIGS[name]), "value", Parallelism(pp=2), Dtype.FLOAT32, 64, lora=adapter)
        total = sum(p.numel() for p in module.parameters())
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        assert trained_parameters(job, 1) == (total, trained)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    fields, heads, vocabulary, parameters = PUBLISHED[name]
    shape = ModelShape.of({**fields, "model_type": "llama", "num_attention_heads": heads, "vocab_size": vocabulary})
    assert shape.parameters() == parameters
    # Two operations a weight and token, nearly all weights in matrices.
    assert shape.forward_flops(1, 0) == pytest.approx(2 * parameters, rel=0.05)
    assert shape.kv_bytes(2) == 4 * fields["num_hidden_layers"] * fields["hidden_size"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("qwen2", torch.bfloat16),
        ("qwen3", torch.float32),
        ("opt", torch.bfloat16),
        *((name, torch.float32) for name in ("gemma2", "gemma3_text", "qwen3_moe", "phi3", "gpt_neox", "gpt_oss")),
    ],
)
def test_saved_activations_are_what_autograd_keeps(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Measured on the trainer's own stages; within 5 %, where 10 % is asked."""
    times = measure_model(reference(tmp_path, CONFIGS[name]), [4], 32, torch.device("cpu"), dtype, repeats=1)
    measured = times.layer_times[0].activation_bytes / (4 * 32)
    assert ModelShape.of(CONFIGS[name]).saved_bytes(dtype.itemsize) == pytest.approx(measured, rel=0.05)


def test_a_rank_by_hand() -> None:
    """LLaMA 7B on 8 A100-80GB, as it is trained here: 16 bytes a weight over dp, and whole copies while it steps."""
    p = 6_738_415_616
    job = Training(shape_of(), "lm", Parallelism(dp=8), Dtype.BFLOAT16, tokens=4096, micro_batches=4)
    memory = training_memory(job, 0)
    assert memory.device["weights"] == p / 2
    assert memory.device["optimizer"] == p
    assert memory.device["gradients"] == p / 2 + 4 * p
    assert memory.device["gathered weights"] == 2 * p
    assert memory.device["activations"] == pytest.approx(32 * 4096 * shape_of().saved_bytes(2), rel=0.01)
    assert sum(memory.host.values()) == 0
    offloaded = training_memory(replace(job, offload=True), 0)
    assert sum(offloaded.host.values()) == p
    averaged = training_memory(replace(job, ema=True), 0)
    assert averaged.device["moving average"] == p / 2
    assert offloaded.device_bytes == pytest.approx(memory.device_bytes - 1.02 * p)
    # With little to compute, the step itself is the peak: masters, gradients and a piece of both moments.
    small = replace(job, layout=Parallelism(), lora=None, micro_batches=1, tokens=1, offload=True, head="value")
    stepping = training_memory(small, 0)
    value = p - 32000 * 4096 + 4096
    assert stepping.device_bytes == pytest.approx(1.02 * 8 * (value + OFFLOAD_NUMBERS) + 1.0 * GIB, rel=0.01)
    alone = training_memory(Training(shape_of(), "value", Parallelism(), Dtype.FLOAT32, 64, gpu=False), 0)
    assert alone.device["weights"] == alone.device["gradients"] == 4 * value
    assert set(alone.device) == {"weights", "gradients", "optimizer", "activations"}


def test_on_a_gpu_versions_are_kept_in_host_memory() -> None:
    job = Training(ModelShape.of(CONFIGS["llama"]), "lm", Parallelism(dp=2), Dtype.BFLOAT16, 64)
    plain, kept = training_memory(job, 0), training_memory(replace(job, kept=3), 0)
    assert kept.device == plain.device
    assert kept.host == {"kept versions": 3 * plain.device["weights"]}


def test_zero_3_gathers_its_two_largest_blocks() -> None:
    """LLaMA 7B: embedding and head are one block, a layer another; a stage between the outer ones has layers only."""
    layer, outer = shape_of().layer_parameters(), 2 * 32000 * 4096 + 4096
    assert outer > layer
    job = Training(shape_of(), "lm", Parallelism(dp=8), Dtype.BFLOAT16, tokens=4096, fsdp=3)
    assert training_memory(job, 0).device["gathered weights"] == 2 * (outer + layer)
    staged = replace(job, layout=Parallelism(pp=4, dp=2))
    stages = [training_memory(staged, stage).device["gathered weights"] for stage in range(4)]
    assert stages == [2 * (2 * layer)] * 4, "half of the outer block is smaller than a layer"
    short = replace(job, layout=Parallelism(pp=32, dp=2))
    assert training_memory(short, 1).device["gathered weights"] == 2 * layer, "there is no second block"
    assert training_memory(short, 0).device["gathered weights"] == 2 * (layer + 32000 * 4096)
    lora = replace(job, lora=LoRA(rank=8))
    adapted, plain = (trained_parameters(each, 0)[0] for each in (lora, job))
    more = training_memory(lora, 0).device["gathered weights"] - training_memory(job, 0).device["gathered weights"]
    assert more == 2 * (adapted - plain) / 32, "a layer's adapters come with it"


def test_a_server_by_hand() -> None:
    shape, lengths = shape_of(), Lengths.fixed(512)
    work = Workload(shape, shape, None, None, 64, 64, 1, lengths, lengths)
    cards = {name: gpu(f"NVIDIA-{name}") for name in ("A100-SXM4-80GB", "A10")}
    there = Inventory(tuple(Pool(name, card, 1, 8) for name, card in cards.items()))
    memory = GPUMemoryModel(work, there)
    one = memory.footprint("generation", Share("A100-SXM4-80GB")).room
    # 0.92 x 79.6 GiB less 12.6 of weights and 3.5 or so of the rest, at half a MiB a token.
    assert one == pytest.approx((73.2 - 12.6 - 3.6) * 2048, rel=0.02)
    assert memory.footprint("generation", Share("A100-SXM4-80GB", tp=4)).room > 4 * one
    assert memory.footprint("generation", Share("A10")).room < one / 10


def test_a_server_shares_experts_over_its_gpus() -> None:
    """Of Qwen3-30B-A3B's 61 GB a server of four A100 has a quarter on each. Norms and routers are whole."""
    shape = ModelShape("qwen3_moe", 48, 2048, 768, 32, 4, 128, 151936, experts=128, chosen=8)
    work = Workload(shape, None, None, None, 8, 8, 1, Lengths.fixed(256), Lengths.fixed(256))
    model = GPUMemoryModel(work, Inventory((Pool("a", gpu("NVIDIA-A100-SXM4-80GB"), 1, 8, 1e9),)))
    held = model.serving_load("generation", Share("a", tp=4)).stays["weights"]
    assert held == pytest.approx(2 * shape.parameters() / 4, rel=0.002)


def test_what_does_not_fit_is_said_in_one_sentence() -> None:
    memory = training_memory(Training(shape_of(), "value", Parallelism(), Dtype.BFLOAT16, 1024), 0)
    message = shortage("critic training", memory.device, 32 * GIB, " on group v100")
    assert message.startswith("critic training needs ")
    assert "GiB per GPU on group v100, 32.0 GiB there (most: optimizer 49.2, " in message


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    return Training(
        shape_of(draw(st.sampled_from([256, 1024, 4096])), draw(st.integers(4, 16))),
        draw(st.sampled_from(["lm", "value"])),
        Parallelism(pp=draw(st.integers(1, 4)), tp=draw(st.sampled_from([1, 2])), dp=draw(st.integers(1, 8))),
        draw(st.sampled_from([Dtype.FLOAT32, Dtype.BFLOAT16])),
        draw(st.integers(1, 8192)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 8)),
        draw(st.none() | st.builds(LoRA, rank=st.integers(1, 16))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@settings(deadline=None)
@given(trainings(), st.data())
def test_memory_grows_with_work_and_shrinks_with_ranks(job: Training, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, job.layout.pp - 1))
    memory = training_memory(job, stage)
    assert all(size >= 0 for size in [*memory.device.values(), *memory.host.values()])

    def device(**changes: Any) -> float:
        return training_memory(replace(job, **changes), stage).device_bytes

    # Moments that come back for the step may be the peak, whatever the passes need.
    stepping = memory.device.get("optimizer, stepping", 0.0) > 0
    # If all micro-batches are under way at once, the first gradients take the place of activations.
    in_place = job.micro_batches <= job.in_flight and device(tokens=job.tokens + 1) == memory.device_bytes
    assert device(tokens=job.tokens + 1) > memory.device_bytes or stepping or in_place
    # Without more micro-batches, there are no gradients yet when all are under way.
    if job.micro_batches > job.in_flight + 1:
        assert device(in_flight=job.in_flight + 1) > memory.device_bytes or stepping
    assert device(fsdp=3) <= device(fsdp=2) + 1e-6 * memory.device_bytes
    assert device(fsdp=1) <= device(fsdp=0) + 1e-6 * memory.device_bytes
    assert device(lora=None) >= memory.device_bytes * 0.999 or job.lora is None
    # The first gradients take the place of activations, of which there are fewer then, and inputs are kept beside them.
    kept = memory.device.get("pipeline buffers", 0.0) * job.in_flight * job.shape.layers
    assert device(recompute=True) <= device(recompute=False) + kept + 1e-6 * memory.device_bytes or job.in_flight == 1
    assert device(offload=True) <= device(offload=False)
    assert device(ema=False) <= device(ema=True)
    if job.sharded:
        # A second rank needs communicators, and gathers and reduces on streams of their own.
        wide = job.layout.model_copy(update={"dp": 2 * job.layout.dp})
        wider = job.layout.model_copy(update={"dp": 4 * job.layout.dp})
        assert device(layout=wider) <= device(layout=wide)
    longer = replace(job, shape=replace(job.shape, layers=job.shape.layers + job.layout.pp))
    assert training_memory(longer, stage).device_bytes > memory.device_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "bert"},
            "'bert' is not supported .it has an encoder, and Dovetail trains decoders",
        ),
        ({"hidden_size": None}, "hidden_size is None; it must be a whole number above 0"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers is '8'"),
    ],
)
def test_configurations_that_cannot_be_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ModelShape.of({**CONFIGS["llama"], **changes})
