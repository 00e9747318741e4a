"""What the trainer uses of torch that torch does not promise to keep. tests/unit/test_compat.py says what has moved."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from dovetail.models.compat import Private

__all__ = [
    "PRIVATE",
    "abort_all_groups",
    "copy_into",
    "forget_groups",
    "is_view",
    "multiply",
    "norms",
    "placed",
    "stage_backward_input",
    "stage_backward_weight",
    "viewed",
]

PRIVATE = (
    Private(
        "torch.distributed.pipelining._backward:stage_backward_input",
        "torch 2.13",
        "the first half of a split backward; torch's own pipeline schedules use it, but nothing public offers it alone",
    ),
    Private(
        "torch.distributed.pipelining._backward:stage_backward_weight",
        "torch 2.13",
        "the second half of a split backward",
    ),
    Private(
        "torch:Tensor._is_view",
        "torch 2.13",
        "a split backward detaches a stage's output in place, which a view does not allow",
    ),
    Private("torch:Tensor._base", "torch 2.13", "a transposed weight that autograd saves is a view of the parameter"),
    Private("torch:_foreach_norm", "torch 2.13", "the norms of all gradients in one kernel, as clip_grad_norm_ has it"),
    Private("torch:_foreach_mul_", "torch 2.13", "all gradients scaled in one kernel, as clip_grad_norm_ has it"),
    Private("torch:_foreach_copy_", "torch 2.13", "a flat message back into all gradients in one kernel"),
    Private(
        "torch.distributed.distributed_c10d:_abort_process_group",
        "torch 2.13",
        "destroying NCCL's groups waits for kernels that wait for a lost peer; this does not",
    ),
    Private(
        "torch.distributed.tensor:DTensor._spec",
        "torch 2.13",
        "from_local copies a shard in host memory to the GPU of its mesh, so what a checkpoint restores would be lost",
    ),
    Private(
        "torch.distributed.device_mesh:DeviceMesh._pg_registry",
        "torch 2.13",
        "torch's caches keep meshes of tensor-parallel layers, whose groups would live on after a rank is lost",
    ),
)


def is_view(tensor: Tensor) -> bool:
    """Whether the tensor shares another one's storage as autograd knows it."""
    return bool(tensor._is_view())


def viewed(tensor: Tensor) -> Tensor:
    """What the tensor is a view of; itself where it is none."""
    base = tensor._base
    return tensor if base is None else base


def norms(tensors: list[Tensor]) -> Tensor:
    """Euclidean norm of each tensor, (len(tensors),) float32."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors in place."""
    torch._foreach_mul_(tensors, factor)


def copy_into(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the tensor at its place."""
    torch._foreach_copy_(tensors, sources)


def placed(shard: Tensor, parameter: Any) -> Tensor:
    """The shard as a DTensor with the parameter's layout, in the shard's own memory wherever that is."""
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor(shard, parameter._spec, requires_grad=False)
    return whole


def abort_all_groups() -> None:
    """End all process groups at once, whatever is under way in them."""
    dist.distributed_c10d._abort_process_group()


def forget_groups(mesh: Any) -> None:
    """Let go of the process groups that a DeviceMesh keeps."""
    getattr(mesh, "_pg_registry", {}).clear()
