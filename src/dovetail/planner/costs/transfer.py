"""Seconds to move a model's new weights from its trainers to a share that generates or scores with it."""

from __future__ import annotations

from dovetail.planner.candidate import Share
from dovetail.planner.costs.memory import ITEMSIZE
from dovetail.planner.costs.rooflines import Constants
from dovetail.planner.inventory import Inventory
from dovetail.planner.shape import Head, ModelShape


def transfer_seconds(
    shape: ModelShape, head: Head, source: Share, target: Share, inventory: Inventory, c: Constants
) -> float:
    """Seconds to bring a model's weights from its training share to a share that generates or scores. Each byte
    leaves its sender once and enters a node of receivers once; the node passes it on."""
    pool, origin = inventory[target.pool], inventory[source.pool]
    same = source.pool == target.pool
    on = same and source.overlaps(target)
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
    """The fraction of what a receiver needs that the trainer on the same GPU holds already."""
    if source.fsdp == 3 and source.dp > 1:
        return 1 / source.dp if (source.pp, source.tp) == (target.pp, target.tp) else 0.0
    if (source.pp, source.tp, source.first) == (target.pp, target.tp, target.first):
        return 1.0
    return target.pp * target.tp / (source.pp * max(source.tp, target.tp)) if target.pp * target.tp < source.pp else 0.0


def _node(share: Share, per_node: int) -> int | None:
    """The node that holds the whole share, or None."""
    first, last = share.first // per_node, (share.first + share.gpus - 1) // per_node
    return first if first == last else None
