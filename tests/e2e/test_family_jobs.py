"""Whole jobs of other families than Llama: what vLLM says of its samples, the trainers say too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.manifest.checks.rules import check
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.models import build_stage
from dovetail.protocol.messages import ModelRef
from helpers.jobs import SMALLER, Fault, Injector, events, history, run_job, same_weights, tiny_job

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
WINDOW = {**SIZES, "sliding_window": 8}
LEARNT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
PLAIN = {**LEARNT, "initializer_range": 0.1}
SHARED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# By family: pipeline stages of the trainers, and sizes of the model. Qwen3 is in test_tied_job.py.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    # Experts and sinks, whole on one stage.
    "gpt_oss": (1, {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # Servers that round to bfloat16, and so choose other experts than trainers in float32 would.
    "qwen3_moe": (2, {**SIZES, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}),
    # On one stage the window, on the other none, with other rotary frequencies; a tied and scaled embedding.
    "gemma3_text": (2, {**WINDOW, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    # The same window, a tied and scaled embedding, and bounds of scores and logits that are reached.
    "gemma2": (
        2,
        {
            **WINDOW,
            "initializer_range": 0.3,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # An MLP in the first layer, shared experts, and routers with a bias that only chooses.
    "glm4_moe": (2, {**SIZES, **SHARED, "attention_bias": True}),
    # The tied ones have their embedding on both stages.
    "mistral": (1, WINDOW),
    "qwen2": (2, {**PLAIN, "intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "phi3": (1, {**PLAIN, "intermediate_size": 96, "num_key_value_heads": 2, "sliding_window": 8}),
    "gpt_neox": (2, {**PLAIN, "intermediate_size": 96}),
    **dict.fromkeys(
        ("olmo2", "olmo3", "smollm3", "glm4", "ministral3", "ernie4_5", "arcee", "exaone4", "seed_oss", "cohere2"),
        (2, {**PLAIN, "intermediate_size": 96, "num_key_value_heads": 2}),
    ),
    # vLLM wraps transformers' classes of these.
    **dict.fromkeys(
        ("ministral", "persimmon", "nanochat", "bitnet"),
        (2, {**PLAIN, "intermediate_size": 96, "num_key_value_heads": 2}),
    ),
    "helium": (2, {**PLAIN, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32}),
    "mellum": (2, {**SIZES, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}),
    "dots1": (2, {**SIZES, **SHARED, "sliding_window": None}),
    "solar_open": (2, {**SIZES, **SHARED, "first_k_dense_replace": 0}),
    # Each layer has rotary positions of its own or none.
    "granite_swa": (
        2,
        {
            **PLAIN,
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [100.0, 0.0],
        },
    ),
    # An MLP beside the experts.
    "granitemoeshared": (
        2,
        {
            **PLAIN,
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
    ),
    "ernie4_5_moe": (
        2,
        {
            **PLAIN,
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 32,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    # An MLP that the files call shared experts, and factors as Granite's.
    "granitemoehybrid": (
        2,
        {
            **PLAIN,
            "shared_intermediate_size": 96,
            "num_key_value_heads": 2,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    # Its layers do not know where packed sequences begin: each is a row.
    "stablelm": (2, {**PLAIN, "intermediate_size": 96, "num_key_value_heads": 2}),
    # Files have other names of its experts than transformers.
    "mixtral": (1, {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # Factors that change the embedding, the attention, the sums and the logits.
    "granite": (
        2,
        {
            **PLAIN,
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    # Types of which transformers' own pass computes a stage: other names of fields, learnt positions; heads of two
    # widths and windows; experts as transformers has them.
    "gpt2": (2, {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "initializer_range": 0.1}),
    "gemma4_text": (
        2,
        {
            **WINDOW,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "falcon": (2, PLAIN),
    # Transformers' masks; vLLM wants chunks of at least a block of its cache.
    "llama4_text": (
        2,
        {**SIZES, "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 128, "pad_token_id": 0},
    ),
    "opt": (2, {**LEARNT, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.1, "tie_word_embeddings": True}),
}
# Folders that also read images, of which the language model is trained.
READS_IMAGES = {
    "gemma3": "gemma3_text",
    "mistral3": "ministral3",
}
KINDS |= {"gemma3": KINDS["gemma3_text"], "mistral3": KINDS["ministral3"]}
ROUNDED = ("qwen3_moe",)
# Experts, routed again; factors; and vLLM's Transformers backend. The passes of all are in tests/unit/models.
ALWAYS = ("qwen3_moe", "granite", "olmo3", "gemma3")
# Responses of random weights are told apart by it.
VARIETY = """
def score(prompts, responses, **fields):
    return [len(set(text)) / 40 for text in responses]
"""


def image_reader(kind: str, fields: dict[str, Any], folder: Path) -> dict[str, str]:
    """A model that also reads images, saved as transformers saves it. Returns the source that names it."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {**fields, "model_type": READS_IMAGES[kind], "vocab_size": 320}
    config = transformers.CONFIG_MAPPING[kind](
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizers.train(["red blue green 0 1 2 3 4 5 6 7 8 9 sorted"] * 20, 300).save_pretrained(folder)
    return {"path": str(folder)}


JOBS = [pytest.param(each, (), None, marks=() if each in ALWAYS else pytest.mark.nightly) for each in KINDS]
# Servers that run the code that trains, where vLLM has its own of the model.
JOBS += [
    pytest.param(each, ("--model-impl", "transformers"), None, marks=pytest.mark.nightly, id=f"{each} of transformers")
    for each in ("qwen2", "mistral", "gemma3_text", "olmo2")
]
ADAPTERS = {"rank": 4, "targetModules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
JOBS.append(pytest.param("mixtral", (), ADAPTERS, marks=pytest.mark.nightly, id="mixtral with adapters on experts"))


@pytest.mark.parametrize(("family", "vllm_args", "lora"), JOBS)
def test_a_job_learns_and_samples_alike(
    family: str, vllm_args: tuple[str, ...], lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Responses are longer than the window. Trainers use the experts that the rollouts chose."""
    pp, config = KINDS[family]
    experts, rounded = MODEL_FAMILIES[READS_IMAGES.get(family, family)].softmax_routers, family in ROUNDED
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "variety.py").write_text(VARIETY)
    scratch = {"scratch": {"architecture": family, "config": config}}
    source, tokenizer = scratch, {"train": {"vocabSize": 300}}
    if family in READS_IMAGES:
        source, tokenizer = image_reader(family, config, tmp_path / "whole"), {}
    job = tiny_job(
        stages=["ppo"],
        models={
            "actor": {"source": source, "lora": lora},
            "tokenizer": tokenizer,
            "reward": {"function": "variety:score", "importPath": str(tmp_path / "code")},
        },
        ppo={
            "iterations": 2,
            "advantage": "grpo",
            "samplesPerPrompt": 4,
            "routingReplay": experts,
            "actorOptimizer": {"learningRate": 3.0e-3},
        },
        groups=[
            {"name": "trainers", "roles": ["trainer"], "replicas": pp},
            {
                "name": "rollouts",
                "roles": ["rollout"],
                "replicas": 1,
                "vllmArgs": list(vllm_args),
                "dtype": "bfloat16" if rounded else "Auto",
            },
        ],
        plan={"parallelism": {"actor": {"pp": pp}}},
        generation={"maxTokens": 24},
        checkpoint={"everySteps": 100},
    )
    assert check(job.spec) == []
    run = tmp_path / "run"
    outcome, _ = run_job(job, run)
    assert outcome.succeeded, outcome.reason
    rows = history(run, "ppo")
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        if experts:
            assert row["routing_unknown"] == 0
            assert row["routing_differs"] < 0.15
        if rounded:
            # Without replay the largest is ten times that.
            assert row["routing_differs"] > 0
            assert row["mismatch_abs_max"] < 0.05, row
        else:
            assert row["mismatch_abs"] < 1e-4, row
        assert row["actor_grad_norm"] > 0
    folder = run / "models" / "actor"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    # More tokens than a window has.
    tokens = torch.randint(0, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        learnt = build_stage(ModelRef(head="lm", path=str(folder)))(tokens)
        torch.testing.assert_close(model(tokens).logits, learnt, atol=1e-4, rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["Auto", "Always"])
def test_ranks_that_divide_the_experts(sharding: str, tmp_path: Path) -> None:
    """All stages with ep 2. Then ranks that each have all experts. Then ep 2 again, where a trainer dies between two
    checkpoints."""
    means = []
    killer = Injector([Fault("trainer-1", lambda status: status["stage"] == "ppo" and status["iteration"] >= 2)])
    for name, ep, inject in (("experts", 2, Injector([])), ("whole", 1, Injector([])), ("killed", 2, killer)):
        job = tiny_job(
            models={"actor": {"source": {"scratch": {"architecture": "qwen3_moe", "config": KINDS["qwen3_moe"][1]}}}},
            ppo={"iterations": 3, "routingReplay": True},
            plan={"parallelism": {"actor": {"dp": 2, "ep": ep}}, "sharding": sharding},
            checkpoint={"everySteps": 100},
            **SMALLER,
        )
        assert check(job.spec) == []
        outcome, _ = run_job(job, tmp_path / name, inject)
        assert outcome.succeeded, outcome.reason
        rows = history(tmp_path / name, "ppo")
        assert sorted(rows) == [1, 2, 3]
        for row in rows.values():
            assert row["routing_unknown"] == 0
            assert row["mismatch_abs"] < 1e-4, "rollouts got other weights"
        means.append({stage: history(tmp_path / name, stage)[1] for stage in ("sft", "reward", "ppo")})
    for stage, name in (("sft", "loss"), ("reward", "loss"), ("ppo", "policy_loss"), ("ppo", "value_loss")):
        assert means[0][stage][name] == pytest.approx(means[1][stage][name], rel=1e-3, abs=1e-5)
    assert killer.killed == ["trainer-1"]
    assert same_weights(tmp_path / "experts", tmp_path / "killed") == []


@pytest.mark.nightly
def test_experts_and_weights_are_the_same_whenever_a_rollout_dies(tmp_path: Path) -> None:
    """With a lag the trainers are ahead of the rollouts: by themselves they would choose other experts."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "variety.py").write_text(VARIETY)
    job = tiny_job(
        stages=["ppo"],
        models={
            "actor": {"source": {"scratch": {"architecture": "qwen3_moe", "config": KINDS["qwen3_moe"][1]}}},
            "reward": {"function": "variety:score", "importPath": str(tmp_path / "code")},
        },
        ppo={
            "lag": 1,
            "iterations": 5,
            "advantage": "grpo",
            "samplesPerPrompt": 4,
            "routingReplay": True,
            "actorOptimizer": {"learningRate": 3.0e-3},
        },
        generation={"maxTokens": 64},
        checkpoint={"everySteps": 100},
    )

    def drawing(status: dict[str, Any]) -> bool:
        done, total = status["samples_done"] or 0, status["samples_total"] or 0
        return status["stage"] == "ppo" and status["iteration"] >= 2 and 0 < done < total / 2

    faults = [Fault("rollouts-1", drawing, child=True)]
    for name, injector in (("still", None), ("killed", Injector(faults))):
        outcome, told = run_job(job, tmp_path / name, injector)
        assert outcome.succeeded, (outcome.reason, told)
        assert {row["routing_unknown"] for row in history(tmp_path / name, "ppo").values()} == {0}
    moved = [e for e in events(tmp_path / "killed", "sample.moved") if e["reason"] == "failure"]
    assert moved
    assert faults[0].done
    assert same_weights(tmp_path / "still", tmp_path / "killed") == []
