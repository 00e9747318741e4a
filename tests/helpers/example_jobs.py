"""The manifests of examples/, and what tests must say of them because nothing is downloaded here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dovetail.gpus.inventory import read
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.planner.placements import recommend
from dovetail.planner.planned_job import Chosen

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


@cache
def recommended(example: str, inventory: str) -> Chosen:
    """The placement of an example on the example of an inventory, both without .yaml. Searched once a process: that of
    the 65B models on 128 GPUs takes nine CPU seconds. Raises Infeasible."""
    spec = resolve(parse(yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())).spec)
    there = read(yaml.safe_load((EXAMPLES / "inventories" / f"{inventory}.yaml").read_text()))
    return recommend(spec, hub_configs(example), there)
