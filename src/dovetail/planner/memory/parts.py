"""Bytes by part, and the sentence that says that they are too many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
# Assumed: what a CUDA process holds besides tensors (context, cuBLAS and NCCL buffers), and the share of the rest that
# torch's allocator loses to fragments.
CONTEXT_BYTES = 1.5 * GIB
FRAGMENTS = 0.03


@dataclass(frozen=True)
class Memory:
    """`device` and `host`: bytes by part of one rank."""

    device: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


def on_gpu(parts: Mapping[str, float]) -> dict[str, float]:
    """With what a CUDA process needs besides."""
    return {**parts, "fragments": FRAGMENTS * sum(parts.values()), "CUDA context": CONTEXT_BYTES}


def explain(task: str, group: str, memory: Memory, capacity: float, remedy: str) -> str | None:
    """One sentence if the task does not fit, else None; `capacity` in bytes."""
    if memory.device_bytes <= capacity:
        return None
    largest = sorted(memory.device.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    need, there = memory.device_bytes / GIB, capacity / GIB
    return f"{task} needs {need:.1f} GiB per GPU on group {group}, {there:.1f} GiB there (most: {parts}); {remedy}"
