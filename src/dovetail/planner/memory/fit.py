"""Whether a training task fits, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dovetail.planner.memory.parts import GIB, Memory, explain
from dovetail.planner.memory.training import Training, training_memory


def worst(job: Training) -> Memory:
    """Of the stage that needs most: the first, the last, or any between, of which the second has most layers."""
    last = job.layout.pp - 1
    stages = (training_memory(job, stage) for stage in sorted({0, min(1, last), last}))
    return max(stages, key=lambda memory: memory.device_bytes)


def with_stages(job: Training, pp: int) -> Training | None:
    """The same mini-batch over the same ranks with `pp` stages under 1F1B, which holds at most pp micro-batches; None
    where the ranks, the layers or the micro-batches do not divide so."""
    ranks = job.layout.pp * job.layout.dp
    total = job.micro_batches * job.layout.dp
    if pp > job.shape.layers or ranks % pp or total % (ranks // pp):
        return None
    micro_batches = total // (ranks // pp)
    layout = job.layout.model_copy(update={"pp": pp, "dp": ranks // pp})
    return replace(job, layout=layout, micro_batches=micro_batches, in_flight=min(pp, micro_batches))


def remedies(job: Training) -> Iterator[tuple[str, Training]]:
    """What a user can change, the smallest change first."""
    if job.gpu and not job.recompute:
        yield "set spec.plan.recompute to Auto", replace(job, recompute=True)
    if job.gpu and not job.offload:
        yield "set the optimizer's offload to true", replace(job, offload=True)
    more = range(job.layout.pp + 1, job.shape.layers + 1)
    staged = [(pp, other) for pp in more if (other := with_stages(job, pp)) is not None]
    for pp, other in staged:
        yield f"raise pp to {pp}", other
    for pp, other in staged:
        if job.gpu and not job.offload:
            yield f"raise pp to {pp} and set the optimizer's offload to true", replace(other, offload=True)


def problem(task: str, group: str, job: Training, capacity: float) -> str | None:
    """None if every stage fits in `capacity` bytes, else one sentence with the number that failed and a remedy that
    works, or else how large a GPU must be."""
    memory = worst(job)
    if memory.device_bytes <= capacity:
        return None
    tried = [(name, worst(other).device_bytes) for name, other in remedies(job)]
    working = next((name for name, size in tried if size <= capacity), None)
    if working is None:
        least = min([memory.device_bytes, *(size for _, size in tried)])
        working = f"use GPUs of at least {least / GIB:.0f} GiB, more of them, smaller micro-batches or LoRA"
    return explain(task, group, memory, capacity, working)
