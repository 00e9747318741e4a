"""A model's folder as users have it, without torch: a Qwen3 with tied weights, and a tokenizer with a chat template."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.text import tokenizer

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def save_model_folder(folder: Path, context: int = 2048) -> Path:
    """The folder. Its weights lack the norms. `context`: the longest sequence, tokens."""
    made = tokenizer.train(["What is it?"], 300)
    made.chat_template = TEMPLATE
    made.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": context}))
    write_weights(folder / "model.safetensors", llama_shapes(CONFIG))
    return folder


def llama_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shapes of a model's matrices, without norms, for a configuration that has its sizes."""
    hidden, inner, heads = (config[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head = config.get("head_dim", hidden // heads)
    queries, keys = heads * head, config.get("num_key_value_heads", heads) * head
    matrices = {
        "self_attn.q_proj": [queries, hidden],
        "self_attn.o_proj": [hidden, queries],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    layers = range(config["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in matrices.items()}
    return {"model.embed_tokens.weight": [config["vocab_size"], hidden], **shapes}


def write_weights(file: Path, shapes: dict[str, list[int]]) -> None:
    """A file of float32 zeros with these shapes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
