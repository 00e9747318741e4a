"""Mistral (Jiang et al. 2023). It is like Llama, but a token attends only to a window of tokens if config.json names
one."""

from __future__ import annotations

from dovetail.manifest.model_families.family import ModelFamily

MISTRAL = ModelFamily(
    name="mistral",
    classes="Mistral",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
    windows="all",
)
