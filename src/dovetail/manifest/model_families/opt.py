"""OPT (Zhang et al. 2022). It has LayerNorm, learnt positions, and no gate in the MLP. Some models embed in fewer
dimensions."""

from __future__ import annotations

from dovetail.manifest.model_families.family import LinearPart, ModelFamily, attention_parts

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
