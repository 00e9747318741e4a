"""Seconds of one pass on given GPUs: rooflines with one set of constants, for what was not measured yet.

What a run or `dovetail profile` has measured takes precedence. Symbols: F peak FLOP/s of the dtype, W memory bytes/s,
b bytes a number, p parameters; tp GPUs share one server or pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.manifest.types import Dtype
from dovetail.planner.costs.memory import ITEMSIZE
from dovetail.planner.hardware import GPU
from dovetail.planner.hashing import hashed_once
from dovetail.planner.shape import Head, ModelShape

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)


class TimingError(ValueError):
    """A task that a GPU cannot do at all; the message names both."""


@hashed_once
@dataclass(frozen=True)
class Constants:
    """Assumed, the same for all GPUs and models: shares of the peaks that are reached, and fixed costs.

    `matrix`: of F in large matrix products; `memory`: of W when weights and KV cache stream through; `link`: of a
    link's bandwidth. `layer_seconds`: launches and latencies of one block in a decode step; `collective_seconds`: of
    one collective or message.

    The host's work, which the GPU waits for where a model is small: `step_seconds` of a step of vLLM at least
    (scheduling, inputs, sampling, output), and `launch_seconds` of each kernel that PyTorch launches, `launches` a
    block in a forward pass. The launches are counted (tests/unit/test_planner_launches.py). Both times are assumed:
    nothing was measured on a GPU."""

    matrix: float = 0.5
    memory: float = 0.65
    link: float = 0.8
    layer_seconds: float = 20e-6
    collective_seconds: float = 15e-6
    step_seconds: float = 2.5e-3
    launch_seconds: float = 5e-6
    launches: int = 36


DEFAULT = Constants()


def flops(gpu: GPU, dtype: Dtype) -> float:
    """F. Raises TimingError for a dtype that the GPU has not."""
    if dtype not in gpu.flops:
        known = ", ".join(sorted(gpu.flops))
        raise TimingError(f"{gpu.product} has no {dtype}; set the group's dtype to one of {known}")
    return gpu.flops[dtype]


def all_reduce(size: float, ranks: int, bandwidth: float, constants: Constants = DEFAULT) -> float:
    """Ring: each rank sends and receives 2 (n - 1) / n of `size` bytes."""
    if ranks == 1:
        return 0.0
    return constants.collective_seconds + 2 * (ranks - 1) / ranks * size / (constants.link * bandwidth)


def all_gather(size: float, ranks: int, bandwidth: float, constants: Constants = DEFAULT) -> float:
    """Ring: each rank receives (n - 1) / n of `size` bytes; a reduce-scatter takes as long."""
    if ranks == 1:
        return 0.0
    return constants.collective_seconds + (ranks - 1) / ranks * size / (constants.link * bandwidth)


def forward(
    shape: ModelShape,
    head: Head,
    tokens: float,
    context: float,
    gpu: GPU,
    dtype: Dtype,
    tp: int = 1,
    c: Constants = DEFAULT,
) -> float:
    """A forward pass over `tokens` positions, `context` attended to on average: arithmetic, reading the weights or
    launching the kernels, whichever is longest, and with tp two all-reduces of the activations a block."""
    b = ITEMSIZE[dtype]
    arithmetic = shape.forward_flops(tokens, context, head) / (tp * c.matrix * flops(gpu, dtype))
    reading = shape.parameters(head) * b / (tp * c.memory * gpu.memory_bandwidth)
    exchange = 2 * shape.layers * all_reduce(tokens * shape.hidden * b, tp, gpu.peer, c)
    launching = shape.layers * c.launches * c.launch_seconds
    return max(arithmetic, reading, launching) + exchange


def decode_step(
    shape: ModelShape, batch: int, context: float, gpu: GPU, dtype: Dtype, tp: int = 1, c: Constants = DEFAULT
) -> float:
    """One token for each of `batch` samples with `context` tokens each: weights and KV cache are read once
    (p b + batch x context x KV bytes, over W), or the arithmetic if that takes longer; at least the host's time."""
    b = ITEMSIZE[dtype]
    read = shape.parameters() * b / tp + batch * context * shape.kv_bytes(b, tp)
    memory = read / (c.memory * gpu.memory_bandwidth)
    arithmetic = shape.forward_flops(batch, context) / (tp * c.matrix * flops(gpu, dtype))
    exchange = 2 * shape.layers * all_reduce(batch * shape.hidden * b, tp, gpu.peer, c)
    return max(max(memory, arithmetic) + shape.layers * c.layer_seconds + exchange, c.step_seconds)


def swap(size: float, gpu: GPU, tp: int = 1, c: Constants = DEFAULT) -> float:
    """`size` bytes from host memory to `tp` GPUs, each over its own PCIe link."""
    return size / (tp * c.link * gpu.pcie)
