"""Qwen3 (Yang et al. 2025). It is like Llama with a norm of each query and key head."""

from __future__ import annotations

from dovetail.manifest.model_families.family import ModelFamily

QWEN3 = ModelFamily(
    name="qwen3",
    classes="Qwen3",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
    head_dim=128,
    head_norms=("q_norm", "k_norm"),
)
