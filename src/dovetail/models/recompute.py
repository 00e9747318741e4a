"""Activation recomputation: of a decoder layer only the input is kept, and the layer runs again when its backward comes
(Chen et al. 2016, arXiv 1604.06174)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dovetail.models.stage import Stage


class _Recomputed(nn.Module):
    """Comes before a layer's class: module hooks, FSDP2's among them, run once and outside of what is done again."""

    # Whether the second run must draw the same random numbers: only the adapters' dropout draws any.
    draws: bool

    def forward(self, hidden: torch.Tensor, **others: Any) -> Any:
        run = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return run(hidden, **others)
        return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=self.draws, **others)


_classes: dict[type[Any], type[Any]] = {}


def _recomputed(cls: type[Any]) -> type[Any]:
    if cls not in _classes:
        _classes[cls] = type(f"Recomputed{cls.__name__}", (_Recomputed, cls), {})
    return _classes[cls]


def recompute(stage: Stage) -> None:
    """Let `stage`'s layers make their activations again in training's backward passes; before they are sharded. The
    gradients are the same bits. Names of parameters stay as they are.

    A backward pass must be whole: each weight's gradient of a split one would run its layer again."""
    for layer in stage.body.layers.values():
        layer.__class__ = _recomputed(type(layer))
        layer.draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules())


def recomputes(stage: Stage) -> bool:
    """Whether `recompute` was called on it."""
    return any(isinstance(layer, _Recomputed) for layer in stage.body.layers.values())
