"""The families of causal language models that Dovetail trains, one file each. `MODEL_FAMILIES` is their only list."""

from __future__ import annotations

from dovetail.manifest.model_families.family import Experts, LinearPart, ModelFamily
from dovetail.manifest.model_families.gemma import GEMMA2, GEMMA3
from dovetail.manifest.model_families.gpt_neox import GPT_NEOX
from dovetail.manifest.model_families.gpt_oss import GPT_OSS
from dovetail.manifest.model_families.llama import LLAMA
from dovetail.manifest.model_families.mistral import MISTRAL
from dovetail.manifest.model_families.opt import OPT
from dovetail.manifest.model_families.phi import PHI3
from dovetail.manifest.model_families.qwen2 import QWEN2
from dovetail.manifest.model_families.qwen3 import QWEN3
from dovetail.manifest.model_families.qwen3_moe import QWEN3_MOE

__all__ = ["MODEL_FAMILIES", "Experts", "LinearPart", "ModelFamily"]

# The families by `model_type` of config.json.
MODEL_FAMILIES: dict[str, ModelFamily] = {
    family.name: family
    for family in (LLAMA, QWEN2, QWEN3, OPT, MISTRAL, GEMMA2, GEMMA3, QWEN3_MOE, PHI3, GPT_NEOX, GPT_OSS)
}
