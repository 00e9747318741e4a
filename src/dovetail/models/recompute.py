"""Adds activation checkpointing to decoder layers (Chen et al. 2016, arXiv 1604.06174). A layer keeps only its input,
and runs again before its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dovetail.models.model_stage import PipelineStage


class _Recomputed(nn.Module):
    """A base class that goes before a layer's own class. Module hooks, such as FSDP2's, run once, because they are
    outside of the part that runs again."""

    # Whether the second run must draw the same random numbers. Only the adapters' dropout draws any.
    draws: bool

    def forward(self, hidden: torch.Tensor, *more: Any, **others: Any) -> Any:
        run = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return run(hidden, *more, **others)
        return checkpoint(run, hidden, *more, use_reentrant=False, preserve_rng_state=self.draws, **others)


_classes: dict[type[Any], type[Any]] = {}


def _recomputed(cls: type[Any]) -> type[Any]:
    if cls not in _classes:
        _classes[cls] = type(f"Recomputed{cls.__name__}", (_Recomputed, cls), {})
    return _classes[cls]


def recompute(stage: PipelineStage) -> None:
    """Turn activation checkpointing on for the stage's layers. Call it before the layers are sharded. The gradients
    stay the same to the last bit. The names of the parameters do not change.

    Then backward passes must not be split, because the gradient of each weight would run its layer again."""
    for layer in stage.layers.values():
        layer.__class__ = _recomputed(type(layer))
        layer.draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules())


def recomputes(stage: PipelineStage) -> bool:
    """Whether the stage has activation checkpointing."""
    return any(isinstance(layer, _Recomputed) for layer in stage.layers.values())
