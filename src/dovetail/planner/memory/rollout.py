"""A vLLM server's GPU, and what the scorer beside it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.manifest.types import Dtype
from dovetail.planner.memory.parts import CONTEXT_BYTES, Memory, on_gpu
from dovetail.planner.memory.training import ITEMSIZE
from dovetail.planner.shape import Head, ModelShape

# vLLM's defaults: tokens of one step, and the share of the GPU it takes. Assumed: what its CUDA graphs hold.
BATCHED_TOKENS = 8192
UTILISATION = 0.92
GRAPH_BYTES = 1.0 * 2**30


@dataclass(frozen=True)
class Server:
    """A vLLM server on `tp` GPUs of `capacity` bytes each. `utilisation`: --gpu-memory-utilization."""

    shape: ModelShape
    dtype: Dtype
    capacity: float
    tp: int = 1
    utilisation: float = UTILISATION
    batched_tokens: int = BATCHED_TOKENS


def _weights(shape: ModelShape, head: Head, dtype: Dtype, tp: int) -> float:
    blocks = shape.layers * shape.layer_parameters(tp)
    ends = shape.embedding_parameters(tp) + shape.head_parameters(head, shape.tied, tp)
    return float((blocks + ends) * ITEMSIZE[dtype])


def _fixed(server: Server) -> dict[str, float]:
    shape, b, tokens = server.shape, ITEMSIZE[server.dtype], server.batched_tokens
    # Of a step over `tokens` positions without a backward pass: the stream, its norm, and the wider of attention's and
    # the MLP's inner tensors; logits of at most 1,024 positions in float32 and once more for the sampler.
    inner = max(shape.queries + 2 * shape.keys, 2 * shape.intermediate) / server.tp
    step = tokens * (3 * shape.hidden + inner) * b + 2 * 1024 * shape.vocabulary * 4
    return {
        "weights": _weights(shape, "lm", server.dtype, server.tp),
        "a step": float(step),
        "CUDA graphs": GRAPH_BYTES,
        "CUDA context": CONTEXT_BYTES,
    }


def kv_tokens(server: Server) -> int:
    """Tokens whose keys and values fit in what is left; 0 or less: the model itself does not fit."""
    left = server.utilisation * server.capacity - sum(_fixed(server).values())
    return int(left // server.shape.kv_bytes(ITEMSIZE[server.dtype], server.tp))


def rollout_memory(server: Server, samples: int, length: int) -> Memory:
    """Of one GPU with `samples` at once of `length` tokens each, prompt and response."""
    kv = samples * length * server.shape.kv_bytes(ITEMSIZE[server.dtype], server.tp)
    return Memory({**_fixed(server), "KV cache": kv}, {})


def scorer_memory(
    models: Sequence[tuple[ModelShape, Head]],
    dtype: Dtype,
    tokens: int,
    swapped: bool,
    logit_bytes: float = math.inf,
) -> Memory:
    """Reference, reward and critic forward passes over `tokens` positions at once, one model after another.

    `swapped`: weights wait in host memory, and one model's are on the GPU at a time. `logit_bytes`: most of the logits
    of a pass."""
    b = ITEMSIZE[dtype]
    weights = [_weights(shape, head, dtype, 1) for shape, head in models]
    steps = [
        tokens * (3 * s.hidden + max(s.queries + 2 * s.keys, 3 * s.intermediate)) * b
        + (head == "lm") * min(tokens * s.vocabulary * b, logit_bytes)
        for s, head in models
    ]
    device = {"weights": max(weights, default=0.0) if swapped else sum(weights), "a step": float(max(steps, default=0))}
    return Memory(on_gpu(device), {"weights": sum(weights)} if swapped else {})
