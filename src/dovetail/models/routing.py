"""Routing replay: the experts that a rollout chose are the ones that a trainer uses (Ma et al. 2025, arXiv 2510.11370).
Near a tie, rounding lets the two choose differently, and their log-probabilities differ by more than rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dovetail.manifest.model_families import Experts


class _Layer(nn.Module):
    """A base class put before a decoder layer's own. `routing` is an argument of the layer, so that what runs again for
    activation checkpointing has it too."""

    replays: str

    def forward(self, hidden: Tensor, routing: Tensor | None = None, **others: Any) -> Any:
        router: Any = self.get_submodule(self.replays)
        router.given = routing
        try:
            return super().forward(hidden, **others)
        finally:
            router.given = None


class _Router(nn.Module):
    """A base class put before a router's own. Weights of the experts are always the present policy's."""

    given: Tensor | None
    over_chosen: bool
    # Experts that the router would have chosen otherwise, and all that it chose, in passes with `given`.
    counts: Tensor | None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = super().forward(hidden)
        if self.given is None:
            return logits, weights, chosen
        known = self.given[:, :1] >= 0
        given = torch.where(known, self.given.to(chosen.dtype), chosen)
        others = (chosen.unsqueeze(2) != given.unsqueeze(1)).all(2).sum()
        counts = torch.stack([others, known.sum() * chosen.shape[1]])
        self.counts = counts if self.counts is None else self.counts + counts
        return logits, self._weights(logits, given), given

    def _weights(self, logits: Tensor, given: Tensor) -> Tensor:
        if self.over_chosen:
            return logits.gather(1, given).softmax(1)
        found = logits.softmax(-1, dtype=torch.float).gather(1, given)
        if self.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return found.to(logits.dtype)


_classes: dict[type[Any], type[Any]] = {}


def _before(base: type[Any], module: nn.Module) -> None:
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (base, cls), {})
    module.__class__ = _classes[cls]


def replays(layer: nn.Module, experts: Experts) -> None:
    """Let a decoder layer take `routing`: (tokens, experts of a token) of whole numbers, -1 for tokens whose experts
    the layer chooses itself; None for all of them."""
    router: Any = layer.get_submodule(f"mlp.{experts.router}")
    router.given, router.counts, router.over_chosen = None, None, experts.over_chosen
    layer.replays = f"mlp.{experts.router}"  # type: ignore[assignment]
    _before(_Router, router)
    _before(_Layer, layer)


def take_counts(module: nn.Module) -> tuple[float, float]:
    """Of all routers in `module` since this was asked before: experts that they would have chosen otherwise, and all
    that they chose. Waits for the device."""
    found = [router for router in module.modules() if isinstance(router, _Router) and router.counts is not None]
    if not found:
        return 0.0, 0.0
    other, every = torch.stack([router.counts for router in found if router.counts is not None]).sum(0).tolist()
    for router in found:
        router.counts = None
    return float(other), float(every)
