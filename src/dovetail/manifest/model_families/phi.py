"""Phi-3 and Phi-4 (Abdin et al. 2024). They are like Llama with fused projections. Rotary positions may turn only a
part of each head."""

from __future__ import annotations

from dovetail.manifest.model_families.family import LinearPart, ModelFamily

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
