"""Messages between ranks that share a GPU. NCCL refuses such ranks, and Gloo sends and receives only host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def send(tensor: Tensor, peer: int, group: Any, staged: bool) -> None:
    """Call `dist.send`. With `staged` the tensor travels through host memory."""
    dist.send(tensor.cpu() if staged else tensor, dst=peer, group=group)


def receive(tensor: Tensor, peer: int, group: Any, staged: bool) -> None:
    """Call `dist.recv`. With `staged` the tensor travels through host memory."""
    target = on_host(tensor) if staged else tensor
    dist.recv(target, src=peer, group=group)
    if staged:
        tensor.copy_(target)


def on_host(tensor: Tensor) -> Tensor:
    """An empty tensor in host memory, page-locked for a tensor on a GPU, with the shape and dtype of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
