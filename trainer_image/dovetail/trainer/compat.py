"""Gathers the parts of torch that the trainer uses and that torch may change.

tests/unit/rollout/test_compat.py fails if one of them has moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import FileSystemReader

from dovetail.models.compat import Private

PRIVATE = (
    Private(
        "torch:Tensor._is_view",
        "torch 2.13",
        "a split backward detaches a stage's output in place, which a view does not allow",
    ),
    Private("torch:Tensor._base", "torch 2.13", "a transposed weight that autograd saves is a view of the parameter"),
    Private(
        "torch.distributed._functional_collectives:AsyncCollectiveTensor.trigger_wait",
        "torch 2.13",
        "what an adapter's first part gathers over tensor-parallel ranks is saved by its second part before it arrives",
    ),
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
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_accumulated_grad_if_needed",
        "torch 2.13",
        "FSDP2 on one rank would copy each gradient, which is whole there, into memory of another stream",
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback",
        "torch 2.13",
        "FSDP2 takes gradients at the end of a whole backward pass only; torch's pipelines call it after split ones",
    ),
    Private(
        "torch.distributed.checkpoint:FileSystemReader._get_metadata_path",
        "torch 2.13",
        "read_metadata unpickles whatever the file names, and nothing public says where the file is",
    ),
    Private(
        "torch.distributed.device_mesh:DeviceMesh._pg_registry",
        "torch 2.13",
        "torch's caches keep meshes of tensor-parallel layers, whose groups would live on after a rank is lost",
    ),
    *(
        Private(
            f"torch._C._distributed_c10d:{name}",
            "torch 2.13",
            "the flight recorder says in which collective a rank waits; torch's public tools read it from pickles",
        )
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    ),
)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one's storage."""
    return bool(tensor._is_view())


def viewed(tensor: Tensor) -> Tensor:
    """The tensor of which this one is a view, or the tensor itself if it is no view."""
    base = tensor._base
    return tensor if base is None else base


def arrived(tensor: Tensor) -> Tensor:
    """The tensor, when a collective that writes it has ended."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each tensor, (len(tensors),) float32."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors by the factor, in place."""
    torch._foreach_mul_(tensors, factor)


def copy_into(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the tensor at the same place in the list."""
    torch._foreach_copy_(tensors, sources)


def placed(shard: Tensor, parameter: Any) -> Tensor:
    """The shard as a DTensor with the parameter's layout. It stays in its own memory, on the host or on a GPU."""
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor(shard, parameter._spec, requires_grad=False)
    return whole


def end_backward(module: Any) -> None:
    """Run what FSDP2 does for its root module at the end of a backward pass."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    state._root_post_backward_final_callback()


def take_whole_gradients(module: Any) -> None:
    """Turn the gradients that FSDP2 has accumulated for an FSDPModule of one rank into the gradients of its parameters.
    Nothing is copied. Existing gradients are added to."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for held in (param for group in groups if group is not None for param in group.fsdp_params):
        unsharded = getattr(held, "_unsharded_param", None)
        if held.unsharded_accumulated_grad is not None:
            gradient = held.unsharded_accumulated_grad_data
            held.unsharded_accumulated_grad = None
        elif unsharded is not None and unsharded.grad is not None:
            gradient = held.unsharded_grad_data
            unsharded.grad = None
        else:
            continue
        sharded = held.sharded_param
        gradient = gradient.view(held.sharded_size)
        if sharded.grad is None:
            sharded.grad = held.to_sharded_dtensor(gradient)
        else:
            sharded.grad._local_tensor += gradient


def abort_all_groups() -> None:
    """End all process groups at once, even those with running operations."""
    dist.distributed_c10d._abort_process_group()


def oldest_wait() -> str:
    """The oldest collective of this process that has not ended, such as `nccl:all_reduce 342`, where 342 counts those
    of its group. Empty if there is none. NCCL's collectives are recorded apart from those of other backends."""
    recorders: Any = torch._C._distributed_c10d
    dumps = [json.loads(dump()) for dump in (recorders._dump_nccl_trace_json, recorders._dump_fr_trace_json)]
    open_ones = [entry for dump in dumps for entry in dump.get("entries", []) if not entry["retired"]]
    if not open_ones:
        return ""
    oldest = min(open_ones, key=lambda entry: entry["time_created_ns"])
    number = oldest["p2p_seq_id"] if oldest["is_p2p"] else oldest["collective_seq_id"]
    return f"{oldest['profiling_name']} {number}"


def forget_groups(mesh: Any) -> None:
    """Drop the process groups that a DeviceMesh keeps."""
    getattr(mesh, "_pg_registry", {}).clear()


def metadata_path(reader: FileSystemReader, rank: int | None) -> Path:
    """The path of the checkpoint's list of tensors. It is one file for all ranks (`rank` None), or the file of one
    rank."""
    return Path(str(reader._get_metadata_path(rank)))
