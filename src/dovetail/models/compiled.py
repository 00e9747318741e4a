"""Decoder layers compiled by torch.compile: norms, rotary embedding, activation and the residual sums become a few
kernels. Attention stays one call outside of them, so lengths of sequences compile nothing anew."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import torch

from dovetail.models.attention import NAME, attend
from dovetail.models.compat import run_what_does_not_compile
from dovetail.models.model_stage import PipelineStage


class _Compiled:
    """A base class put before a layer's own. Module hooks, such as FSDP2's, run outside of what is compiled."""

    compiles: bool
    backend: str

    def forward(self, *inputs: Any, **others: Any) -> Any:
        plain = type(self).plain_forward  # type: ignore[attr-defined]
        if self.compiles:
            plain = _function(plain, self.backend, torch.are_deterministic_algorithms_enabled())
        return plain(self, *inputs, **others)


@cache
def _function(plain: Any, backend: str, deterministic: bool) -> Any:
    """Compiled once for all layers that have this forward. `deterministic`: no choice that changes numbers depends on
    what was measured."""
    options: Any = {"deterministic": True} if deterministic and backend == "inductor" else None
    return torch.compile(plain, backend=backend, dynamic=True, options=options)


@cache
def _class(cls: Any) -> type[Any]:
    return type(f"Compiled{cls.__name__}", (_Compiled, cls), {"plain_forward": cls.forward})


def compile_layers(stage: PipelineStage, backend: str = "inductor") -> None:
    """Let torch.compile run the stage's layers, from their first forward pass on. What it cannot compile runs as it is.
    Call it before the layers are sharded. The names of parameters stay as they are."""
    _prepare()
    for layer in stage.body.layers.values():
        layer.__class__ = _class(layer.__class__)
        layer.compiles, layer.backend = True, backend


@cache
def _prepare() -> None:
    """Once a process, and only where something is compiled: torch's compiler takes seconds to import."""
    from transformers import AttentionInterface

    run_what_does_not_compile()
    AttentionInterface.register(NAME, torch.compiler.disable(attend))


def use_compiled(stage: PipelineStage, wanted: bool) -> None:
    """Whether layers that can run compiled do so. A split backward needs them as they are: what is compiled computes
    the gradients of inputs and weights in one piece."""
    for layer in stage.body.layers.values():
        if isinstance(layer, _Compiled):
            layer.compiles = wanted


def can_compile() -> bool:
    """Whether there is what Triton needs: a C compiler."""
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))
