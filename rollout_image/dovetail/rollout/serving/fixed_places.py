"""Checks that a vLLM server's weights stay at the same addresses on a GPU. Its CUDA graphs read them at the addresses
at which they were when the graphs were captured. So a new version must be written over the old one. vLLM 0.32's
layerwise reload does so. It loads each layer beside the old one and copies it there. A layer at another address would
be served with its old weights, and nobody would notice."""

from __future__ import annotations

import torch

from dovetail.models.transfer import TransferError


class FixedPlaces:
    """The addresses of a model's parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._found = _addresses(model)

    def check(self, model: torch.nn.Module) -> None:
        """Check all addresses. Raises TransferError if one has changed."""
        now = _addresses(model)
        moved = sorted(name for name, address in self._found.items() if now.get(name) != address)
        if moved:
            raise TransferError(
                f"{len(moved)} tensors of the model are no longer where CUDA graphs read them, such as {moved[0]}; "
                "start the server anew, with --enforce-eager if this is a model of your own"
            )


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.data_ptr() for name, tensor in named}
