"""Seconds of each task on given GPUs: rooflines with one set of constants, for what was not measured yet.

Whatever a run or `dovetail profile` has measured goes before these. Symbols: F peak FLOP/s of the dtype, W memory
bytes/s, b bytes a number; p parameters; one instance or stage is shared by tp GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.manifest.types import Dtype
from dovetail.planner.hardware import GPU
from dovetail.planner.hashing import hashed_once
from dovetail.planner.interstage import StageProfile
from dovetail.planner.memory.rollout import Server, kv_tokens
from dovetail.planner.memory.training import ITEMSIZE
from dovetail.planner.shape import Head, ModelShape
from dovetail.planner.switching import Layout

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


@hashed_once
@dataclass(frozen=True)
class Cluster:
    """Equal nodes of `per_node` GPUs. `network`: bytes per second of one GPU to other nodes, one direction."""

    gpu: GPU
    per_node: int
    network: float

    def link(self, ranks: int) -> float:
        """Bytes per second between `ranks` neighbouring ranks: within a node, or else over the network."""
        return self.gpu.peer if ranks <= self.per_node else self.network

    def ring(self, ranks: int, stride: int = 1) -> float:
        """Bytes per second that a collective of `ranks` ranks moves, every `stride`-th GPU taking part. Between nodes
        those of a node add up their cards: data cross once a node, and NVLink passes them on."""
        if ranks * stride <= self.per_node:
            return self.gpu.peer
        return min(self.gpu.peer, max(1, self.per_node // stride) * self.network)


def training_step(
    shape: ModelShape,
    head: Head,
    layout: Layout,
    cluster: Cluster,
    dtype: Dtype,
    sequences: int,
    tokens: float,
    micro_batch: int = 1,
    c: Constants = DEFAULT,
    recompute: bool = False,
) -> float:
    """A mini-batch of `sequences` of `tokens` each, forward, backward (twice the forward, three times with
    `recompute`) and optimizer step, by 1F1B:
    M + pp - 1 times the slowest stage's forward and backward, M micro-batches on each rank; boundaries sent on the way
    through; weights gathered (b P) and gradients reduced (4 P) over dp; 28 bytes of optimizer state and gradients a
    parameter read or written. Sequences that dp does not divide make the last micro-batches fuller."""
    pp, tp, dp, b = layout.pp, layout.tp, layout.dp, ITEMSIZE[dtype]
    micro_batches = max(1, -(-sequences // (dp * micro_batch)))
    whole = forward(shape, head, micro_batch * tokens, tokens / 2, cluster.gpu, dtype, tp, c)
    slowest = -(-shape.layers // pp) / shape.layers
    boundary = micro_batch * tokens * shape.hidden * b / (c.link * cluster.link(pp * dp * tp))
    hops = 2 * (pp - 1) * (boundary + c.collective_seconds)
    share = shape.parameters(head) / (pp * tp)
    exchanged = 0.0
    if dp > 1:
        bandwidth = c.link * cluster.ring(dp, tp)
        exchanged = 2 * c.collective_seconds + (dp - 1) / dp * (b + 4) * share / bandwidth
    optimizer = 28 * share / dp / (c.memory * cluster.gpu.memory_bandwidth)
    passes = (4 if recompute else 3) * whole * slowest
    return (micro_batches + pp - 1) * passes + hops + exchanged + optimizer


def swap(size: float, gpu: GPU, tp: int = 1, c: Constants = DEFAULT) -> float:
    """`size` bytes from host memory to `tp` GPUs, each over its own PCIe link."""
    return size / (tp * c.link * gpu.pcie)


def stage_profile(
    actor: ModelShape,
    scored: Sequence[tuple[ModelShape, Head]],
    gpu: GPU,
    dtype: Dtype,
    tp: int,
    prompt: float,
    response: float,
    max_samples: int = 256,
    network: float | None = None,
    c: Constants = DEFAULT,
    per_prompt: int = 1,
) -> StageProfile:
    """What inter-stage fusion needs to know of a rollout before anything is measured.

    `scored`: the models of the inference stage; `prompt`, `response`: mean tokens; `per_prompt`: samples of a prompt,
    which scorers compute once for those in a pass; `network`: bytes per second between instances if KV caches can be
    moved. Raises TimingError if the model does not fit on the instance."""
    room = kv_tokens(Server(actor, dtype, gpu.memory, tp))
    if room <= 0:
        raise TimingError(
            f"a {actor.parameters() / 1e9:.1f}-billion-parameter actor does not fit on {tp} x {gpu.product} for "
            "generation; give the group more GPUs per pod"
        )
    tokens, b = prompt + response, ITEMSIZE[dtype]
    context = prompt + response / 2
    together = 16 * tokens
    once = 16 * response + -(-16 // min(16, per_prompt)) * prompt
    inference = sum(forward(s, head, once, tokens / 2, gpu, dtype, tp, c) for s, head in scored) / together
    weights = sum(s.parameters(head) * b for s, head in scored)
    return StageProfile(
        decode=tuple((n, decode_step(actor, n, context, gpu, dtype, tp, c)) for n in BATCHES),
        prefill_seconds_per_token=forward(actor, "lm", together, tokens / 2, gpu, dtype, tp, c) / together,
        inference_seconds_per_token=inference,
        swap_in_seconds=swap(weights, gpu, tp, c),
        max_samples=max_samples,
        kv_tokens=room,
        kv_transfer_seconds_per_token=None if network is None else tp * actor.kv_bytes(b, tp) / (c.link * network),
    )
