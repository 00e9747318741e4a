"""The manifests of examples/, and what tests must say of them because nothing is downloaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
_HH = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def hub_configs(example: str) -> dict[str, dict[str, Any]]:
    """By model, the config.json of an example's models that come from the hub; `example`: the manifest's stem."""
    return dict.fromkeys(("actor", "critic", "reward", "reference"), _HH) if example == "hh-rlhf" else {}
