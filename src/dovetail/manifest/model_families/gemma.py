"""Gemma 2 (Riviere et al. 2024) and Gemma 3 (Kamath et al. 2025). They have layers with a window between layers without
one, scaled embeddings, and four norms a layer whose weights are added to 1. Gemma 2 bounds scores and logits. In Gemma
3, heads have norms, and each kind of attention has rotary frequencies of its own."""

from __future__ import annotations

from dovetail.manifest.model_families.family import ModelFamily

_DEFAULTS = {
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
    defaults={**_DEFAULTS, "vocab_size": 256000},
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
    defaults={**_DEFAULTS, "vocab_size": 262208},
    tied=True,
    head_dim=256,
    head_norms=("q_norm", "k_norm"),
    norms=4,
    norm_offset=True,
    windows=6,
    softcap="final_logit_softcapping",
)
