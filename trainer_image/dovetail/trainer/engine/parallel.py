"""Data parallelism of a stage: FSDP2 over the model's dp mesh, float32 master weights, optional lower compute dtype;
or, for small stages on CPUs, a whole copy on every rank."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.manifest.types import Dtype
from dovetail.models import ModelError, PipelineStage
from dovetail.trainer import compat
from dovetail.trainer.engine.optim import local
from dovetail.trainer.groups import ModelGroups

# FSDP2's hooks take a sixth of a small model's step on a CPU; sharding less than this saves too little for that.
REPLICATED_BYTES = 2**30


def is_replicated(stage: PipelineStage, compute: torch.dtype, device: torch.device, always_shard: bool = False) -> bool:
    """Whether every data-parallel rank holds the whole stage, and gradients are added up once a mini-batch. The same
    on all ranks of the stage; works on the meta device.

    Counted are 16 bytes a trained parameter (float32 weight, gradient and two moments) and 4 a frozen one."""
    if always_shard or device.type != "cpu" or compute != torch.float32:
        return False
    held: int = sum(local(p).numel() * (16 if p.requires_grad else 4) for p in stage.parameters())
    return held <= REPLICATED_BYTES


def compute_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Dtype of activations and of the weights that kernels see. Auto: bfloat16 on GPUs that have it, else float32.

    Raises `ModelError` for float16 (it needs loss scaling) and for bfloat16 on a GPU without it."""
    if dtype is Dtype.FLOAT16:
        raise ModelError("dtype float16 is for rollouts only; train in bfloat16 or float32")
    gpu = device.type == "cuda"
    if dtype is Dtype.FLOAT32 or (dtype is Dtype.AUTO and not gpu):
        return torch.float32
    if gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        if dtype is Dtype.AUTO:
            return torch.float32
        raise ModelError(f"{torch.cuda.get_device_name(device)} has no bfloat16; set dtype to float32")
    return torch.bfloat16


def shard(
    stage: PipelineStage, groups: ModelGroups, compute: torch.dtype, device: torch.device, by_layer: bool = False
) -> None:
    """Shard every layer and then the rest over dp. ZeRO-2: a stage's weights stay whole from the first forward to the
    last backward of a mini-batch. ZeRO-3 (`by_layer`): each layer's weights are whole only while a pass is in that
    layer, and its gradients are reduced in each backward pass. Embedding and head are whole from a micro-batch's
    forward to its backward then. Works on a stage still on the meta device. Gradients are summed, not averaged, in
    float32. Layers may be split over tp before. Does nothing on one CPU rank in float32."""
    if device.type == "cpu" and groups.mesh["dp"].size() == 1 and compute == torch.float32:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": groups.mesh["dp"], "reshard_after_forward": False, "mp_policy": policy}
    for layer in stage.body.layers.values():
        fully_shard(layer, **options | {"reshard_after_forward": by_layer})
    fully_shard(stage, **options)
    for module in _sharded(stage):
        module.set_gradient_divide_factor(1.0)
        # Gloo has neither AVG nor PREMUL_SUM.
        module.set_force_sum_reduction_for_comms(True)


def _sharded(stage: PipelineStage) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def is_sharded(stage: PipelineStage) -> bool:
    """Whether FSDP2 holds the stage's weights."""
    return bool(_sharded(stage))


def set_last_backward(stage: PipelineStage, last: bool, alone: bool, by_layer: bool = False) -> None:
    """Whether the next backward pass reduces gradients and reshards (`last`, and every pass of ZeRO-3, `by_layer`), or
    only accumulates gradients. A rank that has nobody to reduce with (`alone`) accumulates in the last one too: see
    `take_gradients`."""
    if sharded := _sharded(stage):
        root = sharded[0]
        root.set_requires_gradient_sync((last or by_layer) and not alone)
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or by_layer)


def take_gradients(stage: PipelineStage) -> None:
    """After the last backward pass of a mini-batch, on a rank that has nobody to reduce with: make what was accumulated
    the gradients. FSDP2 would copy it into memory of another stream, so that room for both is taken."""
    for module in _sharded(stage):
        compat.take_whole_gradients(module)


def take_split_gradients(stage: PipelineStage, compute: torch.dtype, last: bool, alone: bool) -> None:
    """Hand FSDP2 what the second half of a split backward added to the weights' gradients; reduce them if `last`. In
    lower precision it takes them after each, so that they accumulate in float32 as always."""
    if is_sharded(stage) and (last or compute != torch.float32):
        set_last_backward(stage, last, alone)
        compat.end_backward(stage)


def drop_gathered(stage: PipelineStage, layers: bool, rest: bool) -> None:
    """Whether all-gathered weights are dropped right after a forward pass: those of each layer, and the rest."""
    for module in _sharded(stage):
        module.set_reshard_after_forward(rest if module is stage else layers, recurse=False)


def reshard(stage: PipelineStage) -> None:
    """Drop all-gathered weights after forward passes that no backward pass follows."""
    for module in _sharded(stage):
        module.reshard()
