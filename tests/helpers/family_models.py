"""A tiny model from scratch of each model family."""

from __future__ import annotations

from typing import Any

from dovetail.manifest.types import ScratchModel
from dovetail.protocol.messages import ModelRef

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
# So low that they change scores and logits.
GEMMA2_BOUNDS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3, "query_pre_attn_scalar": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "qwen2": {"intermediate_size": 48, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.1},
    # Windows are shorter than the sequences of the tests.
    "mistral": {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 5},
    "gemma2": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, **GEMMA2_BOUNDS},
    "gemma3_text": {
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0},
        },
    },
    "qwen3_moe": {
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "phi3": {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 5, "resid_pdrop": 0.1},
    "gpt_neox": {"intermediate_size": 48, "hidden_dropout": 0.1},
    "gpt_oss": {
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
}


def ref(family: str, head: str = "lm", **changes: Any) -> ModelRef:
    config = COMMON | FAMILIES[family] | {"pad_token_id": 0} | changes
    return ModelRef(head=head, scratch=ScratchModel(architecture=family, config=config), seed=5)
