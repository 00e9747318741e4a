"""The families of causal language models that Dovetail trains. `MODEL_FAMILIES` is their only list."""

from __future__ import annotations

from dovetail.manifest.model_families.family import (
    GATED_MLP,
    Experts,
    LinearPart,
    ModelFamily,
    attention_parts,
)

__all__ = ["MODEL_FAMILIES", "Experts", "LinearPart", "ModelFamily"]

# Llama (Touvron et al. 2023). It has RMSNorm, rotary positions, a gated MLP and grouped key heads.
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

# Qwen2 and Qwen2.5 (Yang et al. 2024). They are like Llama with biases on queries, keys and values.
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

# Qwen3 (Yang et al. 2025). It is like Llama with a norm of each query and key head.
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

# OPT (Zhang et al. 2022). It has LayerNorm, learnt positions, and no gate in the MLP. Some models embed in fewer
# dimensions.
OPT = ModelFamily(
    name="opt",
    classes="OPT",
    defaults={
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    },
    linears=(
        *attention_parts(output="out_proj"),
        LinearPart("fc1", "hidden", "inner", "out", "mlp"),
        LinearPart("fc2", "inner", "hidden", "in", "mlp"),
    ),
    inner_field="ffn_dim",
    embedding_field="word_embed_proj_dim",
    bias_fields=("enable_bias", "enable_bias"),
    bias_default=True,
    tied=True,
    grouped=False,
    body="model.decoder",
    entry=("embed_positions", "project_in"),
    exits=("final_layer_norm", "project_out"),
    layer_norm=True,
    learnt_positions=True,
    kept=1,
)

# Mistral (Jiang et al. 2023). It is like Llama, but a token attends only to a window of tokens if config.json names
# one.
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

# Gemma 2 (Riviere et al. 2024) and Gemma 3 (Kamath et al. 2025). They have layers with a window between layers without
# one, scaled embeddings, and four norms a layer whose weights are added to 1. Gemma 2 bounds scores and logits. In
# Gemma 3, heads have norms, and each kind of attention has rotary frequencies of its own.
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}

GEMMA2 = ModelFamily(
    name="gemma2",
    classes="Gemma2",
    defaults={**_GEMMA, "vocab_size": 256000},
    tied=True,
    head_dim=256,
    norms=4,
    norm_offset=True,
    windows=2,
    softcap="final_logit_softcapping",
    bounded_scores=True,
)
GEMMA3 = ModelFamily(
    name="gemma3_text",
    classes="Gemma3",
    classifier_classes="Gemma3Text",
    defaults={**_GEMMA, "vocab_size": 262208},
    tied=True,
    head_dim=256,
    head_norms=("q_norm", "k_norm"),
    norms=4,
    norm_offset=True,
    windows=6,
    softcap="final_logit_softcapping",
)

# Qwen3 mixtures of experts (Yang et al. 2025). They are like Qwen3 with experts in place of the MLP.
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

# Phi-3 and Phi-4 (Abdin et al. 2024). They are like Llama with fused projections. Rotary positions may turn only a part
# of each head.
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

# GPT-NeoX (Black et al. 2022) and Pythia. They have LayerNorm, fused queries, keys and values, rotary positions for a
# part of each head, and parallel attention and MLP.
GPT_NEOX = ModelFamily(
    name="gpt_neox",
    classes="GPTNeoX",
    defaults={
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "vocab_size": 50432,
    },
    linears=(
        LinearPart("query_key_value", "hidden", "attention", None, "attention"),
        LinearPart("dense", "queries", "hidden", "in", "attention"),
        LinearPart("dense_h_to_4h", "hidden", "inner", "out", "always"),
        LinearPart("dense_4h_to_h", "inner", "hidden", "in", "always"),
    ),
    bias_fields=("attention_bias", "attention_bias"),
    bias_default=True,
    grouped=False,
    body="gpt_neox",
    embedding="embed_in",
    exits=("final_layer_norm",),
    layer_norm=True,
    saved_head="embed_out",
    kept=2,
    partial_rotary=True,
    rotary_fields={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    side_by_side=True,
)

# gpt-oss (OpenAI 2025). It has experts with biases, heads with sinks, and a window in every second layer.
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

# The families by `model_type` of config.json.
MODEL_FAMILIES: dict[str, ModelFamily] = {
    family.name: family
    for family in (LLAMA, QWEN2, QWEN3, OPT, MISTRAL, GEMMA2, GEMMA3, QWEN3_MOE, PHI3, GPT_NEOX, GPT_OSS)
}
