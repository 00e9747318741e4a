"""GPT-NeoX (Black et al. 2022) and Pythia. They have LayerNorm, fused queries, keys and values, rotary positions for a
part of each head, and parallel attention and MLP."""

from __future__ import annotations

from dovetail.manifest.model_families.family import LinearPart, ModelFamily

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
