"""Llama (Touvron et al. 2023). It has RMSNorm, rotary positions, a gated MLP and grouped key heads."""

from __future__ import annotations

from dovetail.manifest.model_families.family import ModelFamily

LLAMA = ModelFamily(
    name="llama",
    classes="Llama",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
)
