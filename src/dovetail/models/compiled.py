"""Compiles decoder layers with torch.compile. Norms, rotary embedding, activation and the residual sums become a few
kernels. Attention stays one call outside of them, so new lengths of sequences compile nothing again."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dovetail.models.compat import prepare_compiler
from dovetail.models.layers.attention import NAME, attend
from dovetail.models.model_stage import PipelineStage


class _Compiled:
    """A base class that goes before a layer's own class. Module hooks, such as FSDP2's, run outside of the compiled
    code."""

    compiles: bool
    backend: str

    def forward(self, *inputs: Any, **others: Any) -> Any:
        plain = type(self).plain_forward  # type: ignore[attr-defined]
        if self.compiles:
            plain = _function(plain, self.backend, torch.are_deterministic_algorithms_enabled())
        return plain(self, *inputs, **others)


@cache
def _function(plain: Any, backend: str, deterministic: bool) -> Any:
    """The compiled forward function `plain`. All layers that have it share the result. With `deterministic`, the
    compiler makes no choice from measured times that changes numbers."""
    options: Any = {"deterministic": True} if deterministic and backend == "inductor" else None
    return torch.compile(plain, backend=backend, dynamic=True, options=options)


@cache
def _class(cls: Any) -> type[Any]:
    return type(f"Compiled{cls.__name__}", (_Compiled, cls), {"plain_forward": cls.forward})


def compile_layers(stage: PipelineStage, backend: str = "inductor") -> None:
    """Let torch.compile run the stage's layers from their first forward pass on. A layer that it cannot compile runs as
    it is. Call it before the layers are sharded. The names of the parameters do not change."""
    _prepare()
    for layer in stage.layers.values():
        layer.__class__ = _class(layer.__class__)
        layer.compiles, layer.backend = True, backend


@cache
def _prepare() -> None:
    """Prepare torch's compiler once in a process. It is only done when a layer is compiled, because importing the
    compiler takes seconds."""
    from transformers import AttentionInterface

    prepare_compiler()
    AttentionInterface.register(NAME, torch.compiler.disable(attend))


def use_compiled(stage: PipelineStage, wanted: bool) -> None:
    """Choose whether the layers that were prepared by `compile_layers` run compiled. A split backward needs plain
    layers, because compiled code computes the gradients of inputs and weights together."""
    for layer in stage.layers.values():
        if isinstance(layer, _Compiled):
            layer.compiles = wanted
