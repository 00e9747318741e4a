"""Data parallelism of a stage. FSDP2 shards it over the model's dp mesh, with float32 master weights and optionally a
lower compute dtype. A small stage on CPUs is instead copied to every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dovetail.manifest.types import Dtype
from dovetail.models import ModelError, PipelineStage
from dovetail.models.layers.expert_ranks import divided
from dovetail.trainer import compat
from dovetail.trainer.communication.groups import ModelGroups
from dovetail.trainer.engine.optim import local

# The least bytes of a stage to shard on CPUs. FSDP2's hooks take a sixth of a small model's step there, and sharding a
# smaller stage saves too little memory for that.
REPLICATED_BYTES = 2**30


def is_replicated(stage: PipelineStage, compute: torch.dtype, device: torch.device, always_shard: bool = False) -> bool:
    """Whether every data-parallel rank holds the whole stage, and gradients are added up once per mini-batch. The
    result is the same on all ranks of the stage. It works on the meta device.

    A trained parameter counts as 16 bytes (float32 weight, gradient and two moments), a frozen one as 4."""
    if always_shard or device.type != "cpu" or compute != torch.float32:
        return False
    held: int = sum(local(p).numel() * (16 if p.requires_grad else 4) for p in stage.parameters())
    return held <= REPLICATED_BYTES


def compute_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations and of the weights in kernels. Auto is bfloat16 on GPUs that support it, else float32.

    Raises `ModelError` for float16, because it needs loss scaling, and for bfloat16 on a GPU without it."""
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
    """Shard every layer, and then the remaining weights, over dp. Does nothing on one CPU rank in float32.

    With ZeRO-2 a stage's weights stay whole from the first forward to the last backward pass of a mini-batch. With
    ZeRO-3 (`by_layer`) a layer's weights are whole only while a pass is in that layer, and its gradients are reduced in
    each backward pass. Embedding and head are then whole from a micro-batch's forward to its backward pass.

    Works on a stage on the meta device, and on layers that are already split over tp. Experts that are divided over
    ranks are sharded over those with the same ones. Gradients are summed in float32, not averaged."""
    if device.type == "cpu" and groups.dp_mesh.size() == 1 and compute == torch.float32:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": groups.dp_mesh, "reshard_after_forward": False, "mp_policy": policy}
    options["ignored_params"] = {stage.get_parameter(name) for name in stage.constants}  # float32 in each pass
    # What routers give stays float32, as it does within a layer.
    apart = {"mp_policy": replace(policy, cast_forward_inputs=False), "reshard_after_forward": by_layer}
    for layer in stage.layers.values():
        for experts in divided(layer):
            fully_shard(experts, **options | apart | {"mesh": groups.expert_dp_mesh})
        fully_shard(layer, **options | {"reshard_after_forward": by_layer})
    fully_shard(stage, **options)
    for module in _sharded(stage):
        module.set_gradient_divide_factor(1.0)
        # Gloo supports neither AVG nor PREMUL_SUM.
        module.set_force_sum_reduction_for_comms(True)


def _sharded(stage: PipelineStage) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def is_sharded(stage: PipelineStage) -> bool:
    """Whether FSDP2 shards the stage's weights."""
    return bool(_sharded(stage))


def set_last_backward(stage: PipelineStage, last: bool, alone: bool, by_layer: bool = False) -> None:
    """Set what the next backward pass does. If it is the mini-batch's `last`, and in every pass of ZeRO-3 (`by_layer`),
    it reduces gradients and reshards. Otherwise it only accumulates gradients. A rank that has no other rank to reduce
    with (`alone`) accumulates in the last pass too: see `take_gradients`."""
    if sharded := _sharded(stage):
        root = sharded[0]
        root.set_requires_gradient_sync((last or by_layer) and not alone)
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or by_layer)


def take_gradients(stage: PipelineStage) -> None:
    """Turn accumulated gradients into the gradients, on a rank that has no other rank to reduce with. Call it after the
    last backward pass of a mini-batch. FSDP2 would copy them, into memory of another stream."""
    for module in _sharded(stage):
        compat.take_whole_gradients(module)


def take_split_gradients(stage: PipelineStage, compute: torch.dtype, last: bool, alone: bool) -> None:
    """Give FSDP2 the weight gradients that the second half of a split backward pass added. Reduce them if `last`. With
    a lower compute dtype it gets them after each half, so that they accumulate in float32 as usual."""
    if is_sharded(stage) and (last or compute != torch.float32):
        set_last_backward(stage, last, alone)
        compat.end_backward(stage)


def drop_gathered(stage: PipelineStage, layers: bool, rest: bool) -> None:
    """Set whether all-gathered weights are dropped right after a forward pass: those of the layers, and the rest."""
    for module in _sharded(stage):
        module.set_reshard_after_forward(rest if module is stage else layers, recurse=False)


def reshard(stage: PipelineStage) -> None:
    """Drop all-gathered weights after forward passes without a backward pass."""
    for module in _sharded(stage):
        module.reshard()
