"""A model's folder as users have it, without torch: a Qwen3 with tied weights, and a tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

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
    """The folder. Its weights cannot be loaded. `context`: the longest sequence, tokens."""
    made = tokenizer.train(["What is it?"], 300)
    made.chat_template = TEMPLATE
    made.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": context}))
    (folder / "model.safetensors").write_bytes(b"x")
    return folder
