"""Computes the seconds of passes on given GPUs with a roofline model and one set of constants. It is used for what was
not measured yet. Figures that the search asks for repeatedly are cached.

Figures that a run or `dovetail profile` has measured take precedence. Symbols: F is the peak FLOP/s of the dtype, W the
memory's bytes per second, b the bytes of a number, and p the parameters. tp GPUs share one server or pipeline stage."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dovetail.fusion.profile import SATURATED
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.planner.candidate import Share
from dovetail.planner.costs.generation import Floats, Servers, expected_longest, quantiles
from dovetail.planner.costs.memory import ITEMSIZE
from dovetail.planner.hardware.gpus import GPU
from dovetail.planner.inventory import Pool
from dovetail.planner.workload import Workload
from dovetail.protocol.budgets import SCORER_TOKENS

# The number of samples that vLLM prefills together.
PREFILLED = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
# These fractions of the peaks are assumed, for all GPUs and models. MATRIX is the fraction of F in large matrix
# products, MEMORY that of W while weights and KV cache are read, and LINK that of a link's bandwidth. With the first
# two, training steps on an H200 were predicted within 8 % (docs/performance.md).
MATRIX = 0.5
MEMORY = 0.65
LINK = 0.8
# The times for launches and latencies, for one block in a decode step, and for one collective or message.
LAYER_SECONDS = 20e-6
COLLECTIVE_SECONDS = 15e-6
# The host's work, for which the GPU waits if a model is small. STEP_SECONDS is the least time of a step of vLLM
# (scheduling, inputs, sampling, output). LAUNCH_SECONDS is the time of each kernel that PyTorch launches, and LAUNCHES
# their number for a block in a forward pass. The launches are counted
# (tests/unit/planner/test_planner_launches.py). Both times are assumed.
STEP_SECONDS = 2.5e-3
LAUNCH_SECONDS = 5e-6
LAUNCHES = 36


def all_reduce(size: float, ranks: int, bandwidth: float) -> float:
    """The seconds of a ring all-reduce, in which each of n ranks sends and receives 2 (n - 1) / n of `size` bytes.
    `bandwidth`: bytes per second."""
    if ranks == 1:
        return 0.0
    return COLLECTIVE_SECONDS + 2 * (ranks - 1) / ranks * size / (LINK * bandwidth)


def all_gather(size: float, ranks: int, bandwidth: float) -> float:
    """The seconds of a ring all-gather, in which each of n ranks receives (n - 1) / n of `size` bytes. A reduce-scatter
    takes as long. `bandwidth`: bytes per second."""
    if ranks == 1:
        return 0.0
    return COLLECTIVE_SECONDS + (ranks - 1) / ranks * size / (LINK * bandwidth)


def forward(shape: ModelShape, head: Head, tokens: float, context: float, gpu: GPU, tp: int = 1) -> float:
    """The seconds of a forward pass over `tokens` positions, which attend to `context` tokens on average. It is the
    longest of arithmetic, reading the weights, and launching kernels. With tp each block adds two all-reduces."""
    b = ITEMSIZE[gpu.dtype]
    arithmetic = shape.forward_flops(tokens, context, head) / (tp * MATRIX * gpu.flops[gpu.dtype])
    reading = shape.read_parameters(tokens, head) * b / (tp * MEMORY * gpu.memory_bandwidth)
    exchange = 2 * shape.layers * all_reduce(tokens * shape.hidden * b, tp, gpu.peer)
    launching = shape.layers * LAUNCHES * LAUNCH_SECONDS
    return max(arithmetic, reading, launching) + exchange


def decode_step(shape: ModelShape, batch: int, context: float, gpu: GPU, tp: int = 1) -> float:
    """The seconds of a decode step, which makes one token for each of `batch` samples with `context` tokens.

    Weights and KV cache are read once, which takes (p b + batch x context x KV bytes) / W. Only experts that are used
    are read. If the arithmetic takes longer, it counts. The step takes at least the host's time."""
    b = ITEMSIZE[gpu.dtype]
    read = shape.read_parameters(batch) * b / tp + batch * context * shape.kv_bytes(b, tp)
    memory = read / (MEMORY * gpu.memory_bandwidth)
    arithmetic = shape.forward_flops(batch, context) / (tp * MATRIX * gpu.flops[gpu.dtype])
    exchange = 2 * shape.layers * all_reduce(batch * shape.hidden * b, tp, gpu.peer)
    return max(max(memory, arithmetic) + shape.layers * LAYER_SECONDS + exchange, STEP_SECONDS)


def gathering(shape: ModelShape, head: Head, pool: Pool, share: Share) -> float:
    """The seconds in which a ZeRO-3 share gathers all weights of a stage, layer by layer. 0 for other shares."""
    if not share.gathers:
        return 0.0
    size = shape.parameters(head) * ITEMSIZE[pool.gpu.dtype] / (share.pp * share.tp)
    layers = max(1, shape.layers // share.pp)
    return all_gather(size, share.shards, pool.ring(share.shards, share.tp)) + (layers - 1) * COLLECTIVE_SECONDS


@lru_cache(maxsize=8192)
def decode_steps(
    shape: ModelShape, pool: Pool, tp: int, context: float, gather: float, most: int
) -> tuple[Floats, int]:
    """The seconds of a decode step with 0 (as 1) to `most` samples, (most + 1,) float64, and BS_max. `gather`: the
    seconds to gather weights before each step."""
    gpu = pool.gpu
    points = [*(n for n in BATCHES if n < most), most]
    seconds = [decode_step(shape, n, context, gpu, tp) + gather for n in points]
    steps: Floats = np.interp(np.arange(most + 1), points, seconds)
    steps.setflags(write=False)
    return steps, max(1, int(np.searchsorted(steps, SATURATED * steps[1], "right")) - 1)


@lru_cache(maxsize=8192)
def servers(share: Share, pool: Pool, work: Workload, room: int, max_samples: int) -> Servers:
    """The vLLM servers of a generation share, each with `room` tokens of KV cache and at most `max_samples` samples."""
    shape, gpu = work.actor, pool.gpu
    prompt, response = work.prompt.mean, work.response.mean
    gather = gathering(shape, "lm", pool, share)
    steps, saturation = decode_steps(shape, pool, share.tp, prompt + response / 2, gather, min(work.batch, max_samples))
    if share.pp > 1:
        steps, saturation = _staged(steps, share, pool, shape), saturation * share.pp
    tokens = PREFILLED * (prompt + response)
    prefill = max(forward(shape, "lm", tokens, prompt, gpu, share.tp) / share.pp, gather) / tokens
    moved = shape.kv_bytes(ITEMSIZE[gpu.dtype], share.tp) / (share.pp * LINK * pool.network)
    return Servers(share.dp, steps, prefill, room, saturation, min(prefill, moved))


def _staged(steps: Floats, share: Share, pool: Pool, shape: ModelShape) -> Floats:
    """The seconds of a decode step with pp stages. The samples are in pp groups that follow each other. A step of all
    groups takes as long as one group takes through all stages, with the messages between them."""
    parts = -(-np.arange(len(steps)) // share.pp)
    sizes = parts * shape.hidden * ITEMSIZE[pool.gpu.dtype]
    hop = COLLECTIVE_SECONDS + sizes / (LINK * pool.link(share.pp * share.tp))
    staged: Floats = steps[parts] + share.pp * hop
    staged.setflags(write=False)
    return staged


@lru_cache(maxsize=8192)
def pass_seconds(
    shape: ModelShape, head: Head, share: Share, pool: Pool, tokens: float, context: float
) -> tuple[float, float, float]:
    """Three parts of a forward pass of one micro-batch, in seconds: its slowest stage, gathering that stage's weights
    at the same time, and sending the boundary tensor to the next stage. The samples have `tokens` tokens,
    which attend to `context` tokens."""
    gpu = pool.gpu
    whole = forward(shape, head, share.micro_batch * tokens, context, gpu, share.tp)
    slowest = -(-shape.layers // share.pp) / shape.layers
    hop = 0.0
    if share.pp > 1:
        boundary = share.micro_batch * tokens * shape.hidden * ITEMSIZE[gpu.dtype]
        hop = COLLECTIVE_SECONDS + boundary / (LINK * pool.link(share.gpus))
    return whole * slowest, gathering(shape, head, pool, share), hop


def shared_prompt(work: Workload, stages: int) -> float:
    """The fraction of a sample's prompt that a scorer computes for it. A pass has each prompt once, for all its
    samples (`dovetail.rollout.scoring.packed_samples.packs`)."""
    prompt, response = work.prompt.mean, work.response.mean
    together = max(1, int((SCORER_TOKENS / stages - prompt) // response))
    return -(-work.per_prompt // together) / work.per_prompt


@lru_cache(maxsize=8192)
def straggling(work: Workload, dp: int) -> float:
    """The tokens of the rank with most tokens of a mini-batch, divided by the mean of the ranks. Samples are dealt by
    length, so it is 1 unless the longest sample alone is more than a rank's share."""
    mini = min(work.mini_batch, work.batch)
    if dp == 1:
        return 1.0
    average = float((quantiles(work.response, mini) + work.prompt.mean).mean())
    most = (expected_longest(work.response, mini) + work.prompt.mean) / average
    return max(1.0, most / max(1.0, mini / dp))
