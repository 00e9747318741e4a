"""gpt-oss (OpenAI 2025). It has experts with biases, heads with sinks, and a window in every second layer."""

from __future__ import annotations

from dovetail.manifest.model_families.family import Experts, ModelFamily, attention_parts

GPT_OSS = ModelFamily(
    name="gpt_oss",
    classes="GptOss",
    defaults={
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "sliding_window": 128,
    },
    linears=attention_parts(),
    bias_fields=("attention_bias", "attention_bias"),
    bias_default=True,
    head_dim=64,
    windows=2,
    sinks=True,
    kept=7,
    experts=Experts(inner="intermediate_size", router="router", over_chosen=True, bias=True, matrices={}),
)
