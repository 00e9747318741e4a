"""The model whose layout is switched."""

from __future__ import annotations

from typing import Any

from papers.routing import Tensor

VOCABULARY = 8192


def config(layers: int, hidden: int) -> dict[str, Any]:
    """A Llama's."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }


def tensors(layers: int, hidden: int) -> list[Tensor]:
    """Its float32 parameters, split by tensor parallel ranks as vLLM splits them: columns of what goes in, rows of what
    comes out."""
    wide = hidden * 11 // 4
    found = [Tensor("embed", (VOCABULARY, hidden), 0, 0, 4)]
    for layer in range(layers):
        found += [Tensor(f"{layer}.{name}", (hidden, hidden), layer, 0, 4) for name in ("q", "k", "v")]
        found += [Tensor(f"{layer}.o", (hidden, hidden), layer, 1, 4)]
        found += [Tensor(f"{layer}.{name}", (wide, hidden), layer, 0, 4) for name in ("gate", "up")]
        found += [Tensor(f"{layer}.down", (hidden, wide), layer, 1, 4)]
        found += [Tensor(f"{layer}.norm{i}", (hidden,), layer, None, 4) for i in (1, 2)]
    return [
        *found,
        Tensor("norm", (hidden,), layers - 1, None, 4),
        Tensor("head", (VOCABULARY, hidden), layers - 1, 0, 4),
    ]
