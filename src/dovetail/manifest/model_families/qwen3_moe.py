"""Qwen3 mixtures of experts (Yang et al. 2025). They are like Qwen3 with experts in place of the MLP."""

from __future__ import annotations

from dovetail.manifest.model_families.family import Experts, ModelFamily, attention_parts

QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    classes="Qwen3Moe",
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
    linears=attention_parts(),
    inner_field="moe_intermediate_size",
    head_norms=("q_norm", "k_norm"),
    experts=Experts(),
)
