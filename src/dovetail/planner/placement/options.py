"""Layouts of one task on the GPUs that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from dovetail.manifest.types import Parallelism
from dovetail.planner.candidate import TRAINING, Share, Task
from dovetail.planner.inventory import Inventory, Pool
from dovetail.planner.placement.limits import MICRO_BATCHES, MOST_STAGES, Limits
from dovetail.planner.placement.structures import Slot
from dovetail.planner.shape import ModelShape
from dovetail.planner.workload import Workload

INFERENCE_MICRO_BATCH = 8
INFERENCE_MICRO_BATCHES = (1, 4)
_EITHER = (False, True)


def options(
    task: Task, slot: Slot, shared: bool, inventory: Inventory, workload: Workload, limits: Limits
) -> Iterator[list[Share]]:
    """Every share of `task` on `slot` that the model's shape and the batch sizes allow, whether or not it fits. Shares
    that differ only in how they save memory come together, from the one that saves nothing to the one that saves most.

    `shared`: the same GPUs also train, so tasks beside the training may have to make room."""
    pool, model = inventory[slot.pool], workload.model(task)
    assert model is not None
    if task in TRAINING:
        yield from _training(task, slot, pool, model[0], workload, limits)
        return
    if task == "generation":
        yield from _serving(slot, shared, pool, model[0], limits)
    else:
        yield from _inference(slot, pool, model[0], limits)


def _serving(slot: Slot, shared: bool, pool: Pool, shape: ModelShape, limits: Limits) -> Iterator[list[Share]]:
    size = limits.servers.get(pool.name)
    ways = (True,) if pool.name in limits.asleep else (False, True) if shared else (False,)
    for tp in _degrees(pool, shape, slot.count):
        for pp in _stages(shape, slot.count // tp):
            if size not in (None, pp * tp) or (limits.within and pool.per_node % (pp * tp)) or pp > limits.serving_pp:
                continue
            dp = slot.count // (pp * tp)
            yield [Share(slot.pool, slot.first, pp=pp, tp=tp, dp=dp, offload=asleep) for asleep in ways]


def _inference(slot: Slot, pool: Pool, shape: ModelShape, limits: Limits) -> Iterator[list[Share]]:
    servers = limits.servers.get(pool.name, 1)  # a scorer beside each, on some of its GPUs
    most = limits.servers.get(pool.name, pool.per_node) if limits.together else slot.count
    for tp in _degrees(pool, shape, slot.count):
        for pp in _stages(shape, slot.count // tp):
            if tp > limits.inference_tp or pp > limits.inference_pp or pp * tp > most:
                continue
            copies = slot.count // max(pp * tp, servers)
            # Stages have the less to wait for, the smaller the micro-batches are: a scorer's are a pp-th.
            least = (max(1, INFERENCE_MICRO_BATCH // pp),)
            for micro in least if pp == 1 or limits.together else INFERENCE_MICRO_BATCHES:
                yield [
                    Share(slot.pool, slot.first, pp, tp, copies, micro_batch=micro, offload=swapped)
                    for swapped in limits.swap
                ]


def _stages(shape: ModelShape, ranks: int) -> list[int]:
    """Numbers of pipeline stages of a task that does not train: powers of two, because they are tried with
    everything else."""
    most = min(shape.layers, ranks, MOST_STAGES)
    return [pp for pp in (2**i for i in range(most.bit_length())) if pp <= most and ranks % pp == 0]


def _degrees(pool: Pool, shape: ModelShape, count: int) -> list[int]:
    """Tensor parallel degrees within a node."""
    return [
        t
        for t in range(1, min(pool.per_node, count) + 1)
        if pool.per_node % t == 0 and count % t == 0 and shape.heads % t == 0
    ]


def _training(
    task: Task, slot: Slot, pool: Pool, shape: ModelShape, workload: Workload, limits: Limits
) -> Iterator[list[Share]]:
    for layout, micro in layouts(task, slot, pool, shape, workload, limits):
        # One rank shares nothing with others, whatever the stage.
        stages = limits.fsdp if layout.dp > 1 else limits.fsdp[:1]
        ways: Iterator[tuple[Any, bool, bool]] = product(stages, limits.recompute, limits.offload.get(task, _EITHER))
        yield [
            Share(slot.pool, slot.first, layout.pp, layout.tp, layout.dp, micro, fsdp, recompute, offload)
            for fsdp, recompute, offload in ways
        ]


def layouts(
    task: Task, slot: Slot, pool: Pool, shape: ModelShape, workload: Workload, limits: Limits
) -> Iterator[tuple[Parallelism, int]]:
    """Every layout (pp, tp, dp) with every size of micro-batch that divides a mini-batch evenly."""
    lora = workload.actor_lora if task == "actor_training" else workload.critic_lora  # adapters are not split
    micros = MICRO_BATCHES if limits.micro_batch is None else (limits.micro_batch,)
    for tp in _degrees(pool, shape, slot.count):
        if tp > limits.max_tp or (tp > 1 and (lora is not None or shape.split_problem(tp) is not None)):
            continue
        ranks = slot.count // tp
        for pp in range(1, min(shape.layers, ranks) + 1):
            if ranks % pp:
                continue
            layout = Parallelism(pp=pp, tp=tp, dp=ranks // pp)
            if task in limits.layouts and layout not in limits.layouts[task]:
                continue
            if any(count % layout.dp for count in limits.batches.get(task, ())):
                continue
            for micro in micros:
                if workload.mini_batch % (layout.dp * micro) == 0:
                    yield layout, micro
