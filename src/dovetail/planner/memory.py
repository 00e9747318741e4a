"""The model of memory: the bytes by part of a training rank, of a vLLM server, of a scorer, and of every GPU in a
candidate. It also finds changes that make a training rank fit.

A training rank runs one stage of a model under FSDP2, as `dovetail.trainer.engine.parallel` sets it up. APP calls this
the MinResourceChecker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.hashing import known_share
from dovetail.manifest.model_shape import Head, Linear, ModelShape
from dovetail.manifest.types import Dtype, LoRA, Parallelism
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Share, Task, cells
from dovetail.planner.workload import Workload
from dovetail.protocol.budgets import LOGPROB_CHUNK_BYTES, OFFLOAD_NUMBERS, SCORER_TOKENS, SHARED_WEIGHT_BYTES
from dovetail.protocol.plan import stage_path, stages_at
from dovetail.protocol.weights import layer_range

GIB = 2**30
# These three are assumed. CONTEXT_BYTES: what a CUDA process holds besides tensors, which is its context with the
# kernels and the communicator for weights. COLLECTIVE_BYTES: NCCL's buffers of a communicator for collectives.
# EDGE_BYTES: those of a communicator between two neighbours in a pipeline.
CONTEXT_BYTES = 1.0 * GIB
COLLECTIVE_BYTES = 0.25 * GIB
EDGE_BYTES = GIB / 16
# The fraction of the other memory that torch's allocator reserves beyond what is allocated, with expandable segments
# (bench-memory-gpu).
FRAGMENTS = 0.02
# vLLM's defaults: the tokens of one step, and the fraction of a GPU's memory that it takes. The memory of its CUDA
# graphs is assumed.
BATCHED_TOKENS = 8192
UTILISATION = 0.92
GRAPH_BYTES = 1.0 * GIB
ITEMSIZE = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank by part, in device memory and in host memory."""

    device: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())


def shortage(name: str, parts: Mapping[str, float], capacity: float, where: str = "") -> str:
    """One sentence without full stop: what `name` needs of a GPU with `capacity` bytes, and the three largest parts."""
    largest = ", ".join(f"{part} {size / GIB:.1f}" for part, size in sorted(parts.items(), key=lambda p: -p[1])[:3])
    need, there = sum(parts.values()) / GIB, capacity / GIB
    return f"{name} needs {need:.1f} GiB per GPU{where}, {there:.1f} GiB there (most: {largest})"


# ------------------------------------------------------------ servers and scorers


def generation_step_bytes(shape: ModelShape, tokens: int, itemsize: int, tp: int = 1) -> float:
    """The bytes that vLLM needs for one step over `tokens` positions. These are the residual stream, its norm, and the
    wider of attention's and the MLP's inner tensors. Experts need the two workspaces of vLLM's fused kernel. The logits
    of at most 1,024 positions are in float32, and the sampler has them once more."""
    i, h = shape.intermediate, shape.hidden
    mlp = shape.chosen * (max(2 * i, h) + i) if shape.experts else 2 * i
    mlp = max(mlp, 2 * shape.dense_intermediate, 2 * shape.shared)
    inner = max(shape.queries + 2 * shape.keys, mlp) / tp
    return tokens * (3 * shape.hidden + inner) * itemsize + 2 * 1024 * shape.vocabulary * 4.0


def scoring_step_bytes(
    shape: ModelShape, head: Head, tokens: int, itemsize: int, tp: int = 1, logit_bytes: float = math.inf
) -> float:
    """The bytes that a scorer needs for one forward pass over `tokens` positions. `logit_bytes`: the most bytes of
    logits. With experts it holds for each token and each of its experts: the state before, gate and up, their product,
    and the state after, with and without the expert's weight."""
    i, h = shape.intermediate, shape.hidden
    mlp = shape.chosen * (3 * i + 3 * h) if shape.experts else 3 * i
    mlp = max(mlp, 3 * shape.dense_intermediate, 3 * shape.shared)
    inner = max(shape.queries + 2 * shape.keys, mlp) / tp
    logits = (head == "lm") * min(tokens * shape.vocabulary * itemsize / tp, logit_bytes)
    return tokens * (3 * shape.hidden + inner) * itemsize + logits


def kept_prefix_bytes(shape: ModelShape, longest: int, itemsize: int, tp: int = 1) -> float:
    """The bytes that a scorer keeps of unfinished samples for one model: keys and values of as many tokens as the
    longest sample may have. Models with experts keep nothing."""
    return 0.0 if shape.experts else longest * shape.kv_bytes(itemsize, tp)


def logit_bytes(shape: ModelShape, outputs: int, itemsize: int, tp: int = 1, training: bool = True) -> float:
    """The bytes on a GPU of the logits of `outputs` positions, of their log-probabilities and, in training, of their
    gradients. Logits of more than a chunk never exist as a whole (`dovetail.models.layers.predictions`)."""
    wide = 4.0 * outputs * shape.vocabulary
    if tp == 1 and wide <= LOGPROB_CHUNK_BYTES:
        # Logits and their gradient, and float32 copies.
        return wide * (3 + 2 * itemsize / 4) if training else wide * (1 + itemsize / 4)
    gradients = 4.0 * outputs * shape.hidden if training else 0.0
    return 2 * min(LOGPROB_CHUNK_BYTES, wide / tp) + gradients


# ------------------------------------------------------------ training


@dataclass(frozen=True)
class Training:
    """The training of one model, which decides a rank's memory.

    `tokens`: the tokens of one micro-batch, padding included. `outputs`: how many of them need logits. None means all.
    `micro_batches`: the micro-batches of a mini-batch. `in_flight`: the most micro-batches whose activations a rank
    holds at once under the schedule. 0: another model shares the schedule, and the activations of both are counted
    together. `recompute`: activation checkpointing, which keeps only the inputs of the blocks.
    `offload`: the optimizer's moments are in host memory between steps. `ema`: there are averaged weights. `gpu`:
    trainers have GPUs. `fsdp`: the ZeRO stage over the dp ranks. 0 shards nothing, 1 shards masters and moments, 2 also
    gradients (the default), and 3 also weights. `kept`: the versions of the weights that a rank keeps in host memory to
    send them (`ppo.lag`). `chunks`: the stages on each rank, which go down the ranks and up again
    (`dovetail.protocol.plan.stage_path`). With several, functions of a stage mean a pipeline rank instead. `pipelines`:
    the pipelines of the layout that are side by side. Ranks of different ones share nothing (`Share.shards`)."""

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
    ema: bool = False
    gpu: bool = True
    fsdp: Literal[0, 1, 2, 3] = 2
    outputs: int | None = None
    kept: int = 0
    chunks: int = 1
    pipelines: int = 1

    @property
    def shards(self) -> int:
        """See `Share.shards`."""
        return self.layout.dp // self.pipelines

    def ends(self, stage: int) -> bool:
        """Whether the head is on this stage."""
        return stage == stage_path(self.layout.pp, self.chunks)[-1]

    def layers(self, stage: int) -> int:
        """The number of layers of a stage."""
        return layers_of(self.shape.layers, self.layout.pp, stage, self.chunks)

    @cached_property
    def adapters(self) -> int:
        """The parameters of LoRA's adapters in one layer, on one tensor-parallel rank."""
        if self.lora is None:
            return 0
        rank, wanted, tp = self.lora.rank, self.lora.target_modules, self.layout.tp
        sizes = [
            linear.share * rank * (linear.inputs // (tp if linear.split == "in" else 1))
            + linear.share * rank * (linear.outputs // (tp if linear.split == "out" else 1))
            for linear in [*self.shape.linears, *self.adapted_experts]
            if not wanted or linear.name in wanted
        ]
        return math.ceil(sum(sizes))

    @property
    def adapted_experts(self) -> list[Linear]:
        """The matrices of experts that have adapters. Each pass makes them again, because peft adds the update to
        them."""
        wanted = [] if self.lora is None else self.lora.target_modules
        return [matrix for matrix in self.shape.of_experts if matrix.name in wanted]

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 wraps the stage. One CPU rank in float32 runs without it."""
        return self.gpu or self.layout.dp > 1 or self.dtype is not Dtype.FLOAT32


def training_job(work: Workload, task: Task, share: Share, dtype: Dtype, stage: int = 0) -> Training:
    """The job of pipeline stage `stage` of a training share under 1F1B, with samples of the longest length."""
    shape, head = work.needed(task)
    tokens = work.longest_micro_batch(share.batch_shares, share.micro_batch)
    count = work.micro_batches(share.batch_shares, share.micro_batch, longest=True)
    own = -(-tokens // share.cp)  # of a rank that shares tokens, and they may all be of responses
    # In micro-batches of whole samples the share of responses is known. Those cut by tokens may be mostly responses.
    by_rows = work.micro_batch_tokens is None
    chunks = work.chunks if share.pp > 1 else 1
    return Training(
        shape,
        head,
        _layout(share.pp, share.tp, share.dp, share.cp, share.ep),
        dtype,
        tokens=own,
        micro_batches=count,
        in_flight=min(share.pp - (stage if chunks == 1 else 0), count),
        lora=work.lora(task),
        recompute=share.recompute,
        offload=share.offload,
        ema=work.ema and task == "actor_training",
        fsdp=2 if share.fsdp == 3 and not share.gathers else share.fsdp,
        kept=work.kept_versions,
        outputs=min(own, tokens // work.longest * work.response.longest) if by_rows else own,
        chunks=chunks,
        pipelines=share.pipelines,
    )


@lru_cache(maxsize=4096)
def _layout(pp: int, tp: int, dp: int, cp: int, ep: int) -> Parallelism:
    return Parallelism.model_construct(pp=pp, tp=tp, dp=dp, cp=cp, ep=ep)


def stage_parameters(shape: ModelShape, head: Head, pp: int, tp: int, stage: int, chunks: int = 1, ep: int = 1) -> int:
    """The parameters of pipeline stage `stage` on one rank of tp and ep, without adapters. With several `chunks` they
    are those of all stages of the pipeline rank `stage`."""
    total = layers_of(shape.layers, pp, stage, chunks) * shape.layer_parameters(tp, ep)
    if stage == 0:
        total += shape.embedding_parameters(tp)
    if stage == stage_path(pp, chunks)[-1]:
        total += shape.head_parameters(head, shape.tied and pp * chunks == 1, tp)
    return total


def layers_of(layers: int, pp: int, place: int, chunks: int = 1) -> int:
    """The number of layers of pipeline rank `place`. Raises LayoutError if there are more stages than layers."""
    return sum(len(layer_range(layers, stage, pp * chunks)) for stage in stages_at(place, pp, chunks))


def trained_parameters(job: Training, stage: int, ep: int = 1) -> tuple[int, int]:
    """The parameters of pipeline stage `stage` on one rank of tp and `ep`: all of them, and the trained ones."""
    total = stage_parameters(job.shape, job.head, job.layout.pp, job.layout.tp, stage, job.chunks, ep)
    if job.lora is None:
        return total, total
    adapters = job.layers(stage) * job.adapters
    return total + adapters, adapters + (job.shape.hidden if job.head != "lm" and job.ends(stage) else 0)


def two_blocks(total: int, layer: int, layers: int) -> int:
    """The most parameters of a stage that are gathered at once, if each block is gathered while the block before it
    works. `total`: the parameters of the stage. `layer`: those of each of its `layers` layers. Embedding and head are
    one more block."""
    outer = total - layers * layer
    return sum(sorted([outer, *[layer] * min(2, layers)])[-2:])


def training_memory(job: Training, stage: int) -> Memory:
    """The memory of one rank of pipeline stage `stage` at the peak of a step, in bytes by part.

    Weights: each rank has a dp-th of the float32 masters. Under FSDP2 (ZeRO-2) it also has a whole copy of the stage in
    the compute dtype, from the first forward to the last backward pass of a mini-batch. Under ZeRO-3 it has two blocks
    at a time.
    Gradients: they are whole in float32 while more micro-batches follow, and then a dp-th. Under ZeRO-3 they are never
    whole. With one rank there is only one copy.
    Moments: each rank has a dp-th of two float32 numbers for each trained weight.
    Kept versions: each rank has the same part of each version as of the masters.

    Ranks of different pipelines share nothing, so dp is `job.shards` here. On a GPU the parts are what torch's
    allocator reserves, separately for each stream. Raises LayoutError if there are more stages than layers."""
    total, trained = trained_parameters(job, stage, job.layout.ep)
    b, layers = ITEMSIZE[job.dtype], max(1, job.layers(stage))
    dp = job.shards if job.fsdp else 1
    # Of experts a dp-th is an ep-th of a (dp / ep)-th.
    whole, taught = trained_parameters(job, stage) if dp > 1 else (total, trained)
    own = 4 * taught / dp if job.fsdp > 1 else 4 * trained
    device = {"weights": 4 * whole / dp, "gradients": own}
    host: dict[str, float] = {}
    layer, adapters = job.shape.layer_parameters(job.layout.tp, job.layout.ep), job.adapters
    each = layer if job.lora is None else adapters
    outer = trained - layers * each  # embedding and head are one more block
    ends = outer
    if job.chunks > 1 and stage == 0 and job.lora is None:
        # Embedding and head are in different stages of the rank, so no pass has both.
        embedding = job.shape.embedding_parameters(job.layout.tp)
        ends = max(embedding, outer - embedding)
    activations = _activations(job, stage, b, each, ends)
    if job.sharded:
        gathered = two_blocks(total, layer + adapters, layers) if job.fsdp == 3 else total
        device["gathered weights"] = float(b * gathered)
        # If all micro-batches of a mini-batch are in flight at once, there are no gradients until the first is done.
        passing = activations["activations"] / job.in_flight if job.micro_batches <= job.in_flight else 0.0
        if job.fsdp > 1 and dp == 1:
            # With one micro-batch, gradients also take the place of weights that a layer no longer needs.
            passing += b * gathered if job.micro_batches == 1 else 0.0
            device["gradients"] = max(4.0 * max(each, outer), own - passing)
        elif job.fsdp > 1:
            # With one micro-batch, a block's gradients are reduced as soon as they are computed.
            block = 4.0 * max(each, outer)
            added = max(block, 4.0 * trained - passing) if job.micro_batches > 1 and job.fsdp < 3 else block
            if job.fsdp == 3 and job.micro_batches == 1:
                # The gradient of embedding and head comes when the activations are freed.
                added = max(4.0 * each, block - activations["activations"])
            device["gradients"] += added
            if job.gpu and job.fsdp == 2:
                # They have a CUDA stream of their own.
                device["all-gather buffers"] = float(b * (total - max(0, layers - 2) * (layer + adapters)))
            elif job.gpu:
                # They have CUDA streams of their own, with two gathered blocks and a part of a reduced block. A stage
                # of few layers takes no more than under ZeRO-2.
                added = 4.0 * max(each, outer) / dp if job.micro_batches > 1 else 0.0
                device["all-gather buffers"] = b * gathered + min(added, float(b * (total - gathered)))
    (host if job.offload and job.gpu else device)["optimizer"] = 8 * taught / dp
    if job.ema:
        device["moving average"] = 4 * taught / dp
    if job.kept:
        (host if job.gpu else device)["kept versions"] = job.kept * 4 * whole / dp
    device |= activations
    if job.offload and job.gpu:
        # For the step, a part of the moments is loaded at a time, after the memory of the passes is freed.
        stepping = device["weights"] + own + device.get("moving average", 0.0) + 8 * min(taught / dp, OFFLOAD_NUMBERS)
        device["optimizer, stepping"] = max(0.0, stepping - sum(device.values()))
    if job.gpu:
        # A CUDA process needs these besides tensors.
        device["fragments"] = FRAGMENTS * sum(device.values())
        device["NCCL buffers"] = communication_bytes(job.layout, job.chunks, job.pipelines)
        device["CUDA context"] = CONTEXT_BYTES
    return Memory(device, host)


def communication_bytes(layout: Parallelism, chunks: int = 1, pipelines: int = 1) -> float:
    """The bytes of NCCL's buffers on a rank of one model. It has communicators over all ranks, over dp, tp and cp, and
    four with the neighbours of each of its stages. With several pipelines it also has one within its pipeline and one
    over the pipelines, and with ep one over the ranks that divide experts and one over those with the same ones."""
    collectives = (layout.pp * layout.dp * layout.tp > 1) + (layout.dp > 1) + (layout.tp > 1)
    collectives += 2 * (1 < pipelines < layout.dp) + (layout.cp > 1) + 2 * (layout.ep > 1)
    return collectives * COLLECTIVE_BYTES + (layout.pp > 1) * 4 * chunks * EDGE_BYTES


def _activations(job: Training, stage: int, b: int, layer: int, outer: int) -> dict[str, float]:
    """The activations of a rank, and what its passes need besides. `b`: the bytes of a number. `layer`, `outer`: the
    trained parameters of each layer, and those of embedding and head as far as one pass has both."""
    shape, tp, layers = job.shape, job.layout.tp, job.layers(stage)
    boundary = job.tokens * shape.hidden * b
    made = b * sum(matrix.share * matrix.inputs * matrix.outputs for matrix in job.adapted_experts)
    block = job.tokens * shape.saved_bytes(b, tp) + made
    saved = job.in_flight * layers * (boundary if job.recompute else block)
    if job.in_flight and job.ends(stage):
        saved += job.tokens * shape.hidden * (4 + 2 * b)  # the last norm
    parts = {"activations": float(saved)}
    if job.layout.pp > 1:
        # Tensors are received and sent while the next micro-batch is on its way.
        parts["pipeline buffers"] = float(4 * boundary)
    if job.layout.cp > 1:
        # Queries, keys and values are sent while those of all tokens are received.
        parts["exchanged heads"] = 2.0 * job.tokens * b * (shape.queries + 2 * shape.keys) / tp
    if job.layout.ep > 1:
        # A layer's tokens are sent to the ranks of their experts while others are received.
        parts["exchanged tokens"] = 2.0 * job.tokens * b * shape.chosen * shape.hidden
    recomputed = float(block) if job.recompute else 0.0
    if not job.gpu:
        if recomputed:
            parts["activations of a layer"] = recomputed
        if job.ends(stage) and job.head != "value":
            # The logits and their gradient exist for the micro-batch whose loss is computed.
            parts["logits"] = 2.0 * job.tokens * shape.vocabulary * b
        return parts
    inner = max(shape.intermediate, shape.dense_intermediate, shape.shared)
    # Gradients of a layer and of its activations are in the compute dtype. Those of embedding and head stay to the end.
    backward = b * (layer + outer) + made + job.tokens * b * (2 * inner / tp + 2 * shape.hidden) + recomputed
    logits = 0.0
    if job.ends(stage) and job.head != "value":
        logits = logit_bytes(shape, job.tokens if job.outputs is None else job.outputs, b, tp)
        parts["logits"] = logits
    parts["a layer's backward"] = max(0.0, backward - logits)
    return parts


def serial_activations(job: Training) -> float:
    """The bytes of activations on the rank that holds most of them under serial 1F1B, if a rank has neighbouring
    stages. The search of schedules keeps to it on GPUs, also with stages in a V (`dovetail.pipelines.serial_memory`).
    `job.in_flight` makes no difference."""
    pp, chunks = job.layout.pp, job.chunks
    one = replace(job, layout=job.layout.model_copy(update={"pp": pp * chunks}), in_flight=1, chunks=1)

    def held(rank: int) -> float:
        each = (
            training_memory(one, stage).device["activations"] for stage in range(rank * chunks, (rank + 1) * chunks)
        )
        return min(pp - rank, job.micro_batches) * sum(each)

    return max(held(rank) for rank in {0, pp - 1})


# ------------------------------------------------------------ what makes it fit


def worst(job: Training) -> Memory:
    """The memory of the stage that needs most: the first, the last, or the second, with most of the other layers."""
    last = job.layout.pp - 1
    stages = (training_memory(job, stage) for stage in sorted({0, min(1, last), last}))
    return max(stages, key=lambda memory: memory.device_bytes)


def remedies(job: Training, zero3: bool = True) -> Iterator[tuple[str, Training]]:
    """The changes that a user can make, the smallest first. `zero3`: the manifest's other pins allow ZeRO-3."""
    if job.gpu and not job.recompute:
        yield "set spec.plan.recompute to Auto", replace(job, recompute=True)
    if zero3 and job.gpu and job.fsdp == 2 and job.layout.dp > 1:
        yield "set spec.plan.zero3 to Auto", replace(job, fsdp=3)
    if job.gpu and not job.offload:
        yield "set the optimizer's offload to true", replace(job, offload=True)


def problem(
    task: str, group: str, job: Training, capacity: float, zero3: bool = True, otherwise: str = ""
) -> str | None:
    """Why a training does not fit in `capacity` bytes. None if every stage fits. It is one sentence with the bytes that
    are needed and a remedy that works, or the size of a GPU that is large enough. `zero3`: see `remedies`. `otherwise`:
    the remedy if none of them works."""
    memory = worst(job)
    if memory.device_bytes <= capacity:
        return None
    tried = [(name, worst(other).device_bytes) for name, other in remedies(job, zero3)]
    least = min([memory.device_bytes, *(size for _, size in tried)])
    otherwise = otherwise or f"use GPUs of at least {least / GIB:.0f} GiB, more of them, smaller micro-batches or LoRA"
    working = next((name for name, size in tried if size <= capacity), otherwise)
    return f"{shortage(task, memory.device, capacity, f' on group {group}')}; {working}"


# Parts of a training rank that stay while other tasks have the GPU.
_STAYS = ("weights", "optimizer", "moving average", "NCCL buffers")
# Parts of a training rank that are there while a pass runs.
_PASSING = ("logits", "a layer's backward")
# The schedules that run both models at once.
_TOGETHER = ("TimeSharing", "Fused", "VShaped")
_PROCESS = {"generation": "vLLM", **dict.fromkeys(INFERENCE, "scorer"), **dict.fromkeys(TRAINING, "trainer")}


@dataclass(frozen=True)
class GPUMemory(Memory):
    """The same of each GPU in `range` of a pool, at an iteration's peak. `capacity`: the bytes of a GPU."""

    pool: str
    range: range
    capacity: float

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.capacity

    @property
    def explanation(self) -> str:
        """One sentence with the bytes and the largest parts."""
        return shortage(f"{self.pool}[{self.range.start}:{self.range.stop}]", self.device, self.capacity)


@dataclass(frozen=True)
class TaskMemory:
    """The bytes by part of one task on one GPU. `stays`: bytes that stay all the time. `works`: bytes that the task
    needs while it works. `host`: bytes in host memory. `gradients`: the bytes of `works` that stay while another model
    trains and when a server wakes up, because the last step is applied while the weights are sent. Under ZeRO-3 they
    include the buffers of the model's streams."""

    stays: Mapping[str, float]
    works: Mapping[str, float]
    host: Mapping[str, float] = field(default_factory=dict)
    gradients: float = 0.0

    @cached_property
    def resident(self) -> float:
        return sum(self.stays.values())

    @cached_property
    def transient(self) -> float:
        return sum(self.works.values())


@dataclass(frozen=True)
class Footprint:
    """The bytes of one GPU for one task. `need`, `room`: the bytes, and the tokens of a server's KV cache, if nothing
    else runs there.

    `kept`: bytes that stay all the time, including fragments and the smallest KV cache of a server that stays awake.
    `works`: further bytes while the task runs. `gradients`: the bytes of `works` that stay until the next iteration's
    server is awake. `serves`: the task generates. `awake`: its server keeps the KV cache while other tasks work."""

    need: float
    room: int = 0
    kept: float = 0.0
    works: float = 0.0
    gradients: float = 0.0
    serves: bool = False
    awake: bool = False


Loads = list[tuple[Task, Share, TaskMemory]]


class GPUMemoryModel:
    """Computes the memory of the tasks of one workload."""

    def __init__(self, work: Workload, inventory: Inventory) -> None:
        self.work, self.inventory = work, inventory

    # ------------------------------------------------------------ one task

    def footprint(self, task: Task, share: Share) -> Footprint:
        """The bytes of a task, without those that depend on other tasks of its GPUs."""
        load, pool = self.load(task, share), self.inventory[share.pool]
        kept, works = (1 + FRAGMENTS) * load.resident, load.transient
        need = kept + works + CONTEXT_BYTES
        if task != "generation":
            return Footprint(need, 0, kept, works, load.gradients)
        each = self._kv_bytes(share)
        room = int((UTILISATION * pool.gpu.memory - need) // each)
        need += self._cached_tokens(share, room) * each
        works += self.work.longest * each
        if self.awake(share):
            kept, works = kept + works, 0.0
        return Footprint(need, room, kept, works, serves=True, awake=self.awake(share))

    def explanation(self, task: Task, share: Share) -> str:
        """The memory that a task with GPUs of its own needs, as one sentence."""
        tasks, room = [(task, share, self.load(task, share))], self.footprint(task, share).room
        return self._peak(self.inventory[share.pool], share.range, tasks, {share: room}).explanation

    def rooms(self, tasks: Iterable[Task], pool: Pool) -> tuple[float, float]:
        """The bytes of a GPU for these tasks: if none of them generates, and if one does (vLLM leaves some free)."""
        contexts = self._contexts(tasks)
        return pool.gpu.memory - contexts, UTILISATION * pool.gpu.memory - contexts

    # ------------------------------------------------------------ a candidate

    def of(self, candidate: Candidate) -> tuple[tuple[GPUMemory, ...], dict[Share, int]]:
        """The memory of every GPU that has a task, and the tokens of KV cache of each generation share's servers. Equal
        neighbours are one entry. With 0 tokens or less not even one sample fits."""
        cells = [(pool, where, self._loads(candidate, on)) for pool, where, on in self._cells(candidate)]
        rooms: dict[Share, int] = {}
        for pool, _, tasks in cells:
            for task, share, load in tasks:
                if task == "generation":
                    taken = self._taken(share, tasks) + self._overhead(tasks)
                    left = UTILISATION * pool.gpu.memory - taken - load.resident - load.transient
                    room = int(left // self._kv_bytes(share))
                    rooms[share] = min(room, rooms.get(share, room))
        both = candidate.schedule in _TOGETHER
        return tuple(self._peak(pool, where, tasks, rooms, both) for pool, where, tasks in cells), rooms

    def server_memory(self, candidate: Candidate) -> dict[Share, float]:
        """The fraction of a GPU's memory that the servers of each generation share may take in all."""
        parts: dict[Share, float] = {}
        for pool, _, on in self._cells(candidate):
            tasks = self._loads(candidate, on)
            for share in (share for task, share, _ in tasks if task == "generation"):
                others = [each for each in tasks if each[0] != "generation"]
                part = UTILISATION - (self._taken(share, tasks) + self._overhead(others)) / pool.gpu.memory
                parts[share] = min(part, parts.get(share, part))
        return parts

    def _taken(self, share: Share, tasks: Loads) -> float:
        """The bytes of a GPU that other tasks have while a server of the generation share `share` generates."""
        others = [other for task, _, other in tasks if task != "generation"]
        taken = sum(other.resident for other in others)
        if self.awake(share):
            return taken + max((other.transient for other in others), default=0.0)
        return taken + sum(other.gradients for other in others)

    def _loads(self, candidate: Candidate, on: list[tuple[Task, Share]]) -> Loads:
        """The loads of tasks that share GPUs. If a rank has stages of both models, it is the rank that holds most."""
        actor, critic = (next((share for task, share in on if task == kind), None) for kind in TRAINING)
        if actor is None or critic is None or actor.range != critic.range:
            return [(task, share, self.load(task, share)) for task, share in on]
        both = candidate.schedule in _TOGETHER
        pairs: list[tuple[int, int] | tuple[None, None]] = [(None, None)]
        if 1 < actor.pp == critic.pp:
            last = actor.pp - 1
            # The critic runs against the actor in the schedules that fuse them, and in some of those in a V.
            against, along = [(0, last), (last, 0)], [(0, 0), (last, last)]
            pairs = [*{"Fused": against, "VShaped": against + along}.get(candidate.schedule, along)]
        found = []
        for pair in pairs:
            stages: dict[Task, int | None] = dict(zip(TRAINING, pair, strict=True))
            found.append([(task, share, self.load(task, share, stages.get(task), both)) for task, share in on])
        most = max(found, key=lambda loads: sum(load.resident + load.transient for _, _, load in loads))
        return self._with_activations(most) if both else most

    def _with_activations(self, loads: Loads) -> Loads:
        """Adds the activations of actor and critic under one schedule to the actor's load on a rank. The other memory
        of a pass exists for one model at a time."""
        trained = {task: (share, load.works) for task, share, load in loads if task in TRAINING}
        passing = {task: sum(works.get(part, 0.0) for part in _PASSING) for task, (_, works) in trained.items()}
        larger = max(passing, key=lambda task: passing[task])
        steps = sum(works.get("optimizer, stepping", 0.0) for _, works in trained.values())
        kept = self._activations_together((task, share) for task, (share, _) in trained.items())
        # Moments in host memory are loaded for the step when the passes are done, so they take the activations' place.
        parts = {"activations of both models": kept, "optimizer, stepping": max(0.0, steps - kept)}
        found = []
        for task, share, load in loads:
            if task in TRAINING:
                left = ("activations", "optimizer, stepping", "fragments", *(() if task == larger else _PASSING))
                works = {name: size for name, size in load.works.items() if name not in left}
                works |= parts if task == "actor_training" else {}
                works["fragments"] = FRAGMENTS * sum(works.values())
                load = replace(load, works=works)
            found.append((task, share, load))
        return found

    def _activations_together(self, trained: Iterable[tuple[Task, Share]]) -> float:
        """The most bytes of activations that a schedule of both models keeps on a rank. The search of schedules keeps
        to the manifest's limit, or to what serial 1F1B takes (`dovetail.coordinator.schedules.scheduling`)."""
        serial, everything = zip(*(self._activation_bounds(task, share) for task, share in trained), strict=True)
        limit = self.work.activation_limit
        return float(max(serial) if limit is None else min(limit, sum(everything)))

    @known_share
    def _activation_bounds(self, task: Task, share: Share) -> tuple[float, float]:
        """The bytes of a model's activations on a rank: the most under serial 1F1B, and those of a whole mini-batch."""
        job = self.training_job(task, share, 0)
        serial = serial_activations(job)
        return serial, serial / min(share.pp, job.micro_batches) * job.micro_batches

    def _cells(self, candidate: Candidate) -> Iterator[tuple[Pool, range, list[tuple[Task, Share]]]]:
        """The ranges of GPUs that have the same tasks."""
        placed = list(candidate.placed)
        for pool in self.inventory.pools:
            mine = [(task, share) for task, share in placed if share.pool == pool.name]
            for where, on in cells([_range(candidate, *each) for each in mine]):
                yield pool, where, [mine[i] for i in on]

    def _peak(
        self, pool: Pool, where: range, tasks: Loads, rooms: Mapping[Share, int], both: bool = False
    ) -> GPUMemory:
        """The peak memory of GPUs with these tasks. `rooms`: see `of`. `both`: one schedule runs actor and critic, so
        both work at the same time."""
        device: dict[str, float] = {}
        host: dict[str, float] = {}
        peaks: list[tuple[float, dict[str, float]]] = []
        for task, share, load in tasks:
            device |= {f"{task}: {name}": size for name, size in load.stays.items()}
            host |= {f"{task}: {name}": size for name, size in load.host.items()}
            works = {f"{task}: {name}": size for name, size in load.works.items()}
            if task == "generation" and share.dp > 1 and not any(other in TRAINING for other, _, _ in tasks):
                # A server that shares no GPU with trainers keeps what it received, to send it to others.
                host["generation: received copy"] = {**load.stays, **load.works}["weights"]
            if task == "generation":
                works["generation: KV cache"] = self._cached_tokens(share, rooms[share]) * self._kv_bytes(share)
                if self.awake(share):
                    device |= works
                    continue
            if task in TRAINING:
                for other, _, beside in tasks:
                    if other in TRAINING and other != task:
                        more = beside.works if both else {"gradients": beside.gradients}
                        works |= {f"{other}: {name}": size for name, size in more.items()}
            if task == "generation":
                works |= {f"{other}: gradients": beside.gradients for other, _, beside in tasks if beside.gradients}
            peaks.append((sum(works.values()), works))
        if peaks:
            device |= max(peaks, key=lambda p: p[0])[1]
        device["contexts, fragments"] = self._overhead(tasks)
        return GPUMemory(device, host, pool.name, where, float(pool.gpu.memory))

    def _overhead(self, tasks: Loads) -> float:
        """The contexts of the processes, and the fragments of the memory that stays."""
        fragments = FRAGMENTS * sum(load.resident for _, _, load in tasks)
        return self._contexts(task for task, _, _ in tasks) + fragments

    def _contexts(self, tasks: Iterable[Task]) -> float:
        """The contexts of the processes, and the memory that they share to pass weights on this GPU."""
        here = set(tasks)
        shares = {"actor_training", "generation"} <= here or {"critic_training", "critic"} <= here
        return self.processes(here) * CONTEXT_BYTES + shares * SHARED_WEIGHT_BYTES

    def _cached_tokens(self, share: Share, room: int) -> float:
        """The tokens of a server's KV cache: its part of the batch if there is room, but at least one sample."""
        work = self.work
        wanted = -(-work.batch // share.dp) * (work.prompt.mean + work.response.mean)
        return max(float(work.longest), min(float(room), max(wanted, work.longest)))

    def _kv_bytes(self, share: Share) -> float:
        """The bytes of the KV cache of one token on one GPU."""
        itemsize = ITEMSIZE[self.inventory[share.pool].gpu.dtype]
        return self.work.actor.kv_bytes(itemsize, share.tp) / share.pp

    # ------------------------------------------------------------ what the software does

    def awake(self, share: Share) -> bool:
        """Whether a server keeps its KV cache while other tasks work."""
        return not share.offload

    def processes(self, tasks: Iterable[Task]) -> int:
        """The number of processes with a CUDA context on a GPU with these tasks."""
        return len({_PROCESS[task] for task in tasks})

    def scored_tokens(self, share: Share) -> int:
        """The tokens of one forward pass of a scorer."""
        return max(self.work.longest, SCORER_TOKENS // share.pp)

    def load(self, task: Task, share: Share, stage: int | None = None, both: bool = False) -> TaskMemory:
        """The memory of one task. `stage`: the pipeline stage of training. None: the stage that holds most. `both`: the
        load is without activations, because one schedule runs actor and critic."""
        return self.training_load(task, share, stage, both) if task in TRAINING else self.serving_load(task, share)

    @known_share
    def training_load(self, task: Task, share: Share, stage: int | None, both: bool) -> TaskMemory:
        """The memory of a training task on a rank of pipeline stage `stage`. For None and `both` see `load`."""
        # The first stage keeps most micro-batches, and the last one has the logits.
        stages = {0, share.pp - 1} if stage is None else {stage}
        jobs = [(self.training_job(task, share, each), each) for each in stages]
        loads = [self.stage_load(replace(job, in_flight=0) if both else job, each) for job, each in jobs]
        return max(loads, key=lambda load: load.resident + load.transient)

    def training_job(self, task: Task, share: Share, stage: int) -> Training:
        """The job of a training share as its pipeline stage `stage` runs it under 1F1B."""
        return training_job(self.work, task, share, self.inventory[share.pool].gpu.training.dtype, stage)

    def stage_load(self, job: Training, stage: int) -> TaskMemory:
        found = training_memory(job, stage)
        parts = {k: v for k, v in found.device.items() if k not in ("fragments", "CUDA context")}
        dp = job.shards if job.fsdp > 1 else 1
        stays = {name: size for name, size in parts.items() if name in _STAYS}
        works = {name: size for name, size in parts.items() if name not in _STAYS}
        works["fragments"] = FRAGMENTS * sum(works.values())
        beside = 4 * trained_parameters(job, stage)[1] / dp
        if job.fsdp == 3:
            beside += works.get("all-gather buffers", 0.0)
        return TaskMemory(stays, works, found.host, beside)

    @known_share
    def serving_load(self, task: Task, share: Share) -> TaskMemory:
        """The memory of generation without its KV cache, or of inference."""
        shape, head = self.work.needed(task)
        b, last = ITEMSIZE[self.inventory[share.pool].gpu.dtype], share.pp - 1
        total = max(stage_parameters(shape, head, share.pp, share.tp, stage) for stage in {0, last})
        size = float(b * total)
        works: dict[str, float] = {}
        if share.fsdp == 3:
            layers = max(1, shape.layers // share.pp)
            works["gathered weights"] = float(b * two_blocks(total, shape.layer_parameters(share.tp), layers))
            size /= share.dp
        if task == "generation":
            works["CUDA graphs"] = GRAPH_BYTES
            works["a step"] = generation_step_bytes(shape, BATCHED_TOKENS, b, share.tp)
        else:
            tokens = self.scored_tokens(share)
            logits = logit_bytes(shape, tokens, b, share.tp, training=False) if head == "lm" else 0.0
            # Logits exist only after the last layer.
            body = scoring_step_bytes(shape, "value", tokens, b, share.tp)
            works["a step"] = max(body, 2.0 * tokens * shape.hidden * b + logits)
        if task == "critic" and not share.offload:
            # While no pass runs, the new version is assembled beside the old one.
            works["new weights"] = max(0.0, size - sum(works.values()))
        held = {"weights": size}
        if task in INFERENCE and (kept := kept_prefix_bytes(shape, self.work.longest, b, share.tp) / share.pp):
            held["kept prefixes"] = kept
        if share.offload:
            return TaskMemory({}, {**works, **held}, {"weights": size})
        return TaskMemory(held, works)


def _range(candidate: Candidate, task: Task, share: Share) -> range:
    """The GPUs that may hold a part of a share. A share's copies beside servers have consecutive GPUs, although each is
    on the first GPUs of its own server. If the servers' GPUs train one of two models, all GPUs of a server count."""
    if task in INFERENCE and candidate.beside and candidate.schedule == "Dedicated":
        server = next((s for s in candidate.generation if s.overlaps(share)), None)
        if server is not None and any(server.overlaps(s) for s in candidate.actor_training):
            return range(share.first, share.first + share.dp * server.pp * server.tp)
    return share.range
