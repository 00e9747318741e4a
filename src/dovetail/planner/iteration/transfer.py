"""Seconds between the tasks: new weights from trainers to those that generate and score, and weights from the host."""

from __future__ import annotations

from dovetail.planner.iteration.system import System
from dovetail.planner.memory.training import ITEMSIZE
from dovetail.planner.placement.candidate import INFERENCE, Candidate, Share
from dovetail.planner.placement.inventory import Inventory
from dovetail.planner.placement.workload import Workload
from dovetail.planner.shape import Head, ModelShape
from dovetail.planner.timing import Constants, swap


def transfer_seconds(candidate: Candidate, work: Workload, inventory: Inventory, system: System, c: Constants) -> float:
    """The actor to every generation share, then the critic to every critic share; receivers of a model at once."""
    total = 0.0
    for task, serving in (("actor_training", candidate.generation), ("critic_training", candidate.critic)):
        model = work.model(task)
        sources = candidate.actor_training if task == "actor_training" else candidate.critic_training
        if model is None or not sources:
            continue
        total += max((_transfer(*model, sources[0], target, inventory, system, c) for target in serving), default=0.0)
    return total


def _transfer(
    shape: ModelShape, head: Head, source: Share, target: Share, inventory: Inventory, system: System, c: Constants
) -> float:
    """Each byte leaves its sender once and enters a node of receivers once; there it is passed on."""
    pool, origin = inventory[target.pool], inventory[source.pool]
    same = source.pool == target.pool
    on = same and source.overlaps(target)
    if system.shared_weights and on and target.fsdp == 3:
        return 0.0  # gathered when used, not before
    size = shape.parameters(head) * ITEMSIZE[pool.gpu.dtype]
    each = size / (target.pp * target.tp)
    within = on and source.first <= target.first and target.first + target.gpus <= source.first + source.gpus
    held = _held(source, target) if within else 0.0  # else some receivers' GPUs have none of it
    if held == 1.0:
        return 0.0
    senders = source.gpus  # each sends a part of what it holds
    near = same and _node(source, pool.per_node) == _node(target, pool.per_node) is not None
    if near:
        seconds = max(each * (1 - held), size * (1 - held) / senders) / pool.gpu.peer
    else:
        local = min(pool.per_node, target.gpus)
        into = size * min(1.0, local / (target.pp * target.tp)) * (1 - held) / (local * pool.network)
        out = size * (1 - held) / (senders * origin.network)
        seconds = max(into, out, each / pool.gpu.peer)
    return c.collective_seconds + seconds / c.link


def _held(source: Share, target: Share) -> float:
    """Part of what a receiver needs that the trainer on the same GPU holds."""
    if source.fsdp == 3 and source.dp > 1:
        return 1 / source.dp if (source.pp, source.tp) == (target.pp, target.tp) else 0.0
    if (source.pp, source.tp, source.first) == (target.pp, target.tp, target.first):
        return 1.0
    return target.pp * target.tp / (source.pp * max(source.tp, target.tp)) if target.pp * target.tp < source.pp else 0.0


def _node(share: Share, per_node: int) -> int | None:
    """The node that holds all of it, None if there is none."""
    first, last = share.first // per_node, (share.first + share.gpus - 1) // per_node
    return first if first == last else None


def swap_seconds(candidate: Candidate, work: Workload, inventory: Inventory, system: System, c: Constants) -> float:
    """Weights of sleeping servers and swapped scorers come from host memory: of tasks on the same GPUs one after the
    other, elsewhere at once. Moments that training offloads count with its steps."""
    if system.hidden_swaps:
        return 0.0
    spent: dict[tuple[str, int], float] = {}
    for task in ("generation", *INFERENCE):
        for share in candidate.shares(task):  # type: ignore[arg-type]
            if share.offload:
                key = share.pool, share.first
                spent[key] = spent.get(key, 0.0) + swap_of(task, share, work, inventory, c)
    return max(spent.values(), default=0.0)


def swap_of(task: str, share: Share, work: Workload, inventory: Inventory, c: Constants) -> float:
    """Of the weights of one task."""
    model = work.model(task)
    if model is None:
        return 0.0
    pool = inventory[share.pool]
    size = model[0].parameters(model[1]) * ITEMSIZE[pool.gpu.dtype] / (share.pp * share.tp)
    return swap(size / share.dp if share.fsdp == 3 else size, pool.gpu, 1, c)
