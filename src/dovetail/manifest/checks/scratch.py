"""Checks a scratch model's configuration without a model library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from dovetail.manifest.model_families.support import family_of, text_part
from dovetail.manifest.types import ScratchModel

# The head dimensions that vLLM's attention on CPUs supports.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# It takes latent states of 576 dimensions, and its log-probabilities then differ from transformers' by 0.2 and more.
# It computes linear attention in bfloat16 only, and its packages for CPUs lack torchvision, which those classes import.
NOT_ON_CPUS = "vLLM on CPUs computes neither latent keys and values nor linear attention as transformers does"

# These fields are whole numbers of at least 1.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def architecture_layers(model: ScratchModel) -> int | None:
    """The number of layers. None if the configuration's value is not a number."""
    told = text_part({"model_type": model.architecture, **model.config})
    family = family_of(told)
    layers = told.get("num_hidden_layers", family and family.defaults["num_hidden_layers"])
    return layers if is_count(layers) else None


def head_size(config: Mapping[str, Any]) -> int | None:
    """The dimensions of one attention head in a Hugging Face configuration. None if the configuration does not say."""
    family, config = family_of(config), text_part(config)
    if size := config.get("head_dim") or (family.head_dim if family is not None else None):
        return int(size)
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return int(hidden) // int(heads) if hidden and heads else None


def needs_gpus(config: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face configuration is of a model that vLLM does not compute on CPUs."""
    family = family_of(config)
    return family is not None and (family.latent or family.recurrent)


def cpu_head_error(config: Mapping[str, Any]) -> str | None:
    """A sentence without its full stop if vLLM cannot run the model's attention on CPUs."""
    if needs_gpus(config):
        return NOT_ON_CPUS
    size = head_size(config)
    return None if size is None or size in CPU_HEAD_SIZES else unsupported_heads(size)


def unsupported_heads(size: object) -> str:
    """The sentence about heads of `size` dimensions."""
    return (
        f"the actor's attention heads have {size} dimensions (hidden_size / num_attention_heads); vLLM on CPUs takes "
        f"{', '.join(map(str, CPU_HEAD_SIZES))}"
    )


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value of a configuration is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
