"""Phi-1.5 and Phi-2 (Li et al. 2023): attention and MLP side by side, and a bias everywhere. Phi-3 and Phi-4 (Abdin et
al. 2024): as Llama, with fused projections. Rotary positions may turn a part of each head only."""

from __future__ import annotations

from dovetail.manifest.model_families.family import LinearPart, ModelFamily

PHI = ModelFamily(
    name="phi",
    classes="Phi",
    defaults={
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "vocab_size": 51200,
    },
    linears=(
        LinearPart("q_proj", "hidden", "queries", None, "always"),
        LinearPart("k_proj", "hidden", "keys", None, "always"),
        LinearPart("v_proj", "hidden", "keys", None, "always"),
        LinearPart("dense", "queries", "hidden", None, "always"),
        LinearPart("fc1", "hidden", "inner", None, "always"),
        LinearPart("fc2", "inner", "hidden", None, "always"),
    ),
    exits=("final_layernorm",),
    norms=1,
    layer_norm=True,
    head_bias=True,
    kept=5,
    partial_rotary=True,
)
PHI3 = ModelFamily(
    name="phi3",
    classes="Phi3",
    defaults={
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32064,
    },
    linears=(
        LinearPart("qkv_proj", "hidden", "attention", None, "never"),
        LinearPart("o_proj", "queries", "hidden", "in", "never"),
        LinearPart("gate_up_proj", "hidden", "gates", None, "never"),
        LinearPart("down_proj", "inner", "hidden", "in", "never"),
    ),
    windows="all",
    partial_rotary=True,
)
