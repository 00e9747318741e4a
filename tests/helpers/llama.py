"""LLaMA's sizes, as the papers' benchmark has them, and one that is smaller."""

from __future__ import annotations

from dovetail.manifest.model_shape import ModelShape
from helpers.papers import common

_SMALL = ModelShape("llama", 16, 2048, 5504, 16, 16, 128, 32000)


def llama(billions: str) -> ModelShape:
    """1, 7, 13, 33 or 65."""
    return _SMALL if billions == "1" else common.llama(f"{billions}B")
