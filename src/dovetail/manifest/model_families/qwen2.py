"""Qwen2 and Qwen2.5 (Yang et al. 2024). They are like Llama with biases on queries, keys and values."""

from __future__ import annotations

from dovetail.manifest.model_families.family import GATED_MLP, ModelFamily, attention_parts

QWEN2 = ModelFamily(
    name="qwen2",
    classes="Qwen2",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
    # This holds whatever the configuration says.
    linears=(*attention_parts(inputs_bias="always"), *GATED_MLP),
)
