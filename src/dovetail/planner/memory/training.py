"""One training rank: a stage of a model under FSDP2 as `dovetail.trainer.parallel` sets it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dovetail.manifest.types import Dtype, LoRA, Parallelism
from dovetail.planner.memory.parts import Memory, on_gpu
from dovetail.planner.shape import Head, ModelShape
from dovetail.planner.switching import layer_range

ITEMSIZE = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}
# dovetail.trainer.algorithms.logprobs.GPU_CHUNK_BYTES, and about three of them at a time.
LOSS_CHUNK_BYTES = 3 * 256 * 2**20


@dataclass(frozen=True)
class Training:
    """One model's training. `tokens`: of one micro-batch, padding included. `in_flight`: most micro-batches whose
    activations a rank holds at once, as the schedule says; `micro_batches`: of a mini-batch.

    `recompute`: only the blocks' inputs are kept, and one block's activations at a time made again. `offload`:
    optimizer moments live in host memory between steps. `ema`: where the averaged weights are, if there are any.
    `fsdp`: what the dp ranks share, as ZeRO's stages count it: 0 nothing, 1 masters and moments, 2 gradients too
    (ours), 3 weights too."""

    shape: ModelShape
    head: Head
    layout: Parallelism
    dtype: Dtype
    tokens: int
    micro_batches: int = 1
    in_flight: int = 1
    lora: LoRA | None = None
    recompute: bool = False
    offload: bool = False
    ema: Literal["device", "host"] | None = None
    gpu: bool = True
    fsdp: Literal[0, 1, 2, 3] = 2

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 wraps the stage (one CPU rank in float32 goes without)."""
        return self.gpu or self.layout.dp > 1 or self.dtype is not Dtype.FLOAT32


def stage_parameters(job: Training, stage: int) -> tuple[int, int]:
    """Parameters of pipeline stage `stage` on one tensor parallel rank: all, and those that are trained."""
    shape, tp, pp = job.shape, job.layout.tp, job.layout.pp
    layers = len(layer_range(shape.layers, stage, pp))
    total = layers * shape.layer_parameters(tp)
    if stage == 0:
        total += shape.embedding_parameters(tp)
    if stage == pp - 1:
        total += shape.head_parameters(job.head, shape.tied and pp == 1, tp)
    if job.lora is None:
        return total, total
    each = _layer_adapters(job)
    return total + layers * each, layers * each + _value_head(job, stage)


def two_blocks(total: int, layer: int, layers: int) -> int:
    """Most parameters of a stage of `total` that are whole at once where each block is gathered while the one before
    works: of layers of `layer` parameters, and of embedding and head, which are a block of their own."""
    outer = total - layers * layer
    return sum(sorted([outer, *[layer] * min(2, layers)])[-2:])


def _value_head(job: Training, stage: int) -> int:
    return job.shape.hidden if job.head != "lm" and stage == job.layout.pp - 1 else 0


def _layer_adapters(job: Training) -> int:
    """Parameters of LoRA's adapters in one layer."""
    assert job.lora is not None
    tp = job.layout.tp
    wanted = set(job.lora.target_modules)
    return sum(
        job.lora.rank * (linear.inputs // (tp if linear.split == "in" else 1))
        + job.lora.rank * (linear.outputs // (tp if linear.split == "out" else 1))
        for linear in job.shape.linears()
        if not wanted or linear.name in wanted
    )


def training_memory(job: Training, stage: int) -> Memory:
    """Of one rank of pipeline stage `stage`, at the peak of a step.

    Weights: float32 masters, a dp-th each; under FSDP2 (ZeRO-2) a whole copy of the stage in the compute dtype from the
    first forward to the last backward of a mini-batch; under ZeRO-3 of two blocks at a time. Gradients: added up whole
    in float32 while there are further micro-batches (not under ZeRO-3), then a dp-th. Moments: two float32 of the
    trained weights, a dp-th. Raises LayoutError for more stages than layers."""
    total, trained = stage_parameters(job, stage)
    b, layers = ITEMSIZE[job.dtype], max(1, len(_layers(job, stage)))
    dp = job.layout.dp if job.fsdp else 1
    device = {"weights": 4 * total / dp, "gradients": 4 * trained / (dp if job.fsdp > 1 else 1)}
    host: dict[str, float] = {}
    whole = 0.0
    if job.sharded:
        layer, adapters = job.shape.layer_parameters(job.layout.tp), 0 if job.lora is None else _layer_adapters(job)
        gathered = two_blocks(total, layer + adapters, layers) if job.fsdp == 3 else total
        device["gathered weights"] = float(b * gathered)
        # With one micro-batch a block's gradients are reduced as soon as they are there.
        each = layer if job.lora is None else adapters
        block = max(each, trained - layers * each)  # embedding and head are another one
        whole = (trained if job.micro_batches > 1 and job.fsdp < 3 else block) if job.fsdp > 1 else 0.0
        device["gradients"] += 4 * whole
    (host if job.offload and job.gpu else device)["optimizer"] = 8 * trained / dp
    if job.ema is not None:
        (device if job.ema == "device" else host)["moving average"] = 4 * trained / dp
    kept = sum(device.values()) - device.get("gathered weights", 0.0) - 4 * whole
    device |= _activations(job, stage, b)
    if job.offload and job.gpu:
        # The moments come back for the step, when whatever the passes needed is free again.
        device["optimizer, stepping"] = max(0.0, kept + 8 * trained / dp - sum(device.values()))
    return Memory(on_gpu(device) if job.gpu else device, host)


def _layers(job: Training, stage: int) -> range:
    return layer_range(job.shape.layers, stage, job.layout.pp)


def _activations(job: Training, stage: int, b: int) -> dict[str, float]:
    shape, tp, layers = job.shape, job.layout.tp, len(_layers(job, stage))
    boundary = job.tokens * shape.hidden * b
    block = job.tokens * shape.saved_bytes(b, tp)
    saved = job.in_flight * layers * (boundary if job.recompute else block)
    if stage == job.layout.pp - 1:
        saved += job.tokens * shape.hidden * (4 + 2 * b)  # the last norm
    parts = {"activations": float(saved)}
    if job.recompute:
        parts["activations of a layer"] = float(block)
    if job.layout.pp > 1:
        # What comes in and goes out while the next micro-batch is on its way.
        parts["pipeline buffers"] = float(4 * boundary)
    if stage == job.layout.pp - 1 and job.head != "value":
        # The logits of the micro-batch whose loss is computed, and their gradient; the loss goes by chunks. Tensor
        # parallel ranks gather them, and have their own part of the gradient besides.
        logits = job.tokens * shape.vocabulary * b
        chunk = min(LOSS_CHUNK_BYTES, 3 * job.tokens * shape.vocabulary * 4) if job.gpu else 0
        parts["logits"] = (2 + (1 / tp if tp > 1 else 0)) * logits + chunk
    return parts
