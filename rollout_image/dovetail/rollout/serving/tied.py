"""Handles tied embeddings in a vLLM server. The head must use the weights that the embedding got.

Trainers send a tied weight once, under the embedding's name. vLLM 0.32's layerwise reload loads it into the embedding,
whose parameter the head shares, and skips the head ("ParallelLMHead: Failed to load weights"). On GPUs the head
multiplies by this parameter, so nothing else is needed. On CPUs it multiplies by a packed copy. vLLM makes this copy
when it loads the head, and would never renew it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dovetail.models.transfer import TransferError
from dovetail.rollout.compat import is_vocabulary, pack_vocabulary


@dataclass(frozen=True)
class Tied:
    """A module, by its name in the model, that shares the weight of `source`."""

    name: str
    module: Any
    source: Any


def tied_modules(model: torch.nn.Module) -> list[Tied]:
    """The heads of a loaded model that share an embedding's weight, on each pipeline stage that has both."""
    first: dict[int, Any] = {}
    found = []
    for name, module in model.named_modules():
        if is_vocabulary(module):
            source = first.setdefault(id(module.weight), module)
            if source is not module:
                found.append(Tied(name, module, source))
    return found


def renew(tied: list[Tied]) -> None:
    """Compute the packed copies of the tied modules' weights again, after vLLM has finished a reload. Raises
    TransferError if a module no longer shares the weight, because it would serve older weights."""
    for one in tied:
        if one.module.weight is not one.source.weight:
            raise TransferError(f"{one.name} is tied to the embedding and did not get its new weights")
        pack_vocabulary(one.module)
