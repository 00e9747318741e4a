"""Lists which GPUs each task may get: every way to divide an inventory that the three placements allow (APP section
V-A)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from dovetail.manifest.sizes import world_size
from dovetail.planner.candidate import TASKS, Candidate, Placement, Share
from dovetail.planner.inventory import Inventory, Pool
from dovetail.planner.placement.search.limits import Limits
from dovetail.planner.workload import Workload

# Up to so many nodes every size is tried. Beyond, a grid is tried, and the search refines the best sizes node by node.
EVERY_NODE = 16
HALVES = "reference and reward on halves"
APART = "actor and critic train apart"
ALONE = "training on GPUs of its own"


Slots = tuple[Share, ...]
"""The GPUs that a task may use, before it has a layout there."""
# A function of a pool and a number of its GPUs. It returns the smaller numbers at which to divide them.
Sizes = Callable[[Pool, int], list[int]]


def apart(structure: Candidate) -> bool:
    """Whether actor and critic train on GPUs of their own."""
    return bool(structure.critic_training) and structure.critic_training != structure.actor_training


def every_size(pool: Pool, count: int) -> list[int]:
    """The numbers of GPUs below `count` that are worth trying: powers of two within a node, and whole nodes."""
    within = {2**i for i in range(pool.per_node.bit_length()) if 2**i < pool.per_node}
    nodes = range(1, count // pool.per_node + 1)
    return sorted(s for s in {*within, *(n * pool.per_node for n in nodes)} if s < count)


def part_sizes(pool: Pool) -> list[int]:
    """The numbers of a pool's GPUs to try for one of two models that divide the pool. On one node it is every number.
    On several nodes it is those of `sizes`, for either model."""
    found = range(1, pool.gpus) if pool.gpus <= pool.per_node else sizes(pool, pool.gpus)
    return sorted({*found, *(pool.gpus - size for size in found)})


def sizes(pool: Pool, count: int) -> list[int]:
    """Like `every_size`, but with many nodes only a grid, which is finer towards both ends."""
    nodes = -(-count // pool.per_node)
    coarse = nodes > EVERY_NODE
    grid = _steps(nodes) if coarse else set()
    return [s for s in every_size(pool, count) if not coarse or s < pool.per_node or s // pool.per_node in grid]


def _steps(nodes: int) -> set[int]:
    """The grid: 1, 2, 3, 4, 6, 8, 12, 16, 24 ... nodes, and all nodes but so many."""
    grid = {b * 2**i for b in (2, 3) for i in range(nodes.bit_length())} | {1}
    return {n for n in grid if n < nodes} | {nodes - n for n in grid if n < nodes}


def structures(inventory: Inventory, workload: Workload, limits: Limits, grid: Sizes = sizes) -> Iterator[Candidate]:
    """All structures, each once and in a fixed order. A structure is a candidate whose shares have no layout yet.
    `grid`: gives the sizes at which a pool's GPUs are divided."""
    seen = set()
    missing: dict[str, Any] = {task: () for task in TASKS if workload.model(task) is None}
    if workload.critic is None:
        limits = replace(limits, shared_body=True)  # here too only the actor trains
    for found in _all(inventory, limits, grid):
        kept = replace(found, **missing)
        if kept.placement in limits.placements and kept not in seen:
            seen.add(kept)
            yield kept


def _all(inventory: Inventory, limits: Limits, grid: Sizes) -> Iterator[Candidate]:
    trainable = [p for p in inventory.pools if limits.trainers is None or p.name in limits.trainers]
    # Without bfloat16, training runs in float32. Such pools train only if there is no other pool.
    trainable = [p for p in trainable if p.gpu.bf16] or trainable
    usable = [p for p in inventory.pools if limits.rollouts is None or p.name in limits.rollouts]
    for pool in trainable:
        whole = Share(pool.name, dp=pool.gpus)
        others = tuple(Share(p.name, dp=p.gpus) for p in usable if p.name != pool.name)
        if pool in usable:
            rests = [others, ()] if others and not limits.whole else [others]
            for rest in rests:
                yield from _together(whole, rest, pool, limits)
        if limits.whole:
            if pool not in usable and others:
                yield from _separate(whole, others, inventory, limits, grid)
            continue
        for count in [*grid(pool, pool.gpus), pool.gpus]:
            training, left = whole.cut(count)
            segments = ((left,) if left.gpus and pool in usable else ()) + others
            if segments:
                yield from _separate(training, segments, inventory, limits, grid)


def _training(slot: Share, pool: Pool, limits: Limits) -> Iterator[tuple[Slots, Slots, str]]:
    """Actor and critic on the same GPUs, or on two parts of them."""
    if False in limits.apart or limits.shared_body:
        yield (slot,), (slot,), ""
    if True in limits.apart and not limits.shared_body:
        for at in _parts(slot, pool, limits):
            actor, critic = slot.cut(at)
            yield (actor,), (critic,), APART


def _parts(slot: Share, pool: Pool, limits: Limits) -> list[int]:
    """The numbers of GPUs to try for the actor: about a quarter, a half and three quarters. For a manifest's trainers
    they are the numbers that its layouts allow."""
    unit = pool.per_node if slot.gpus > pool.per_node else 1
    found = {round(slot.gpus * share / unit) * unit for share in (1 / 4, 1 / 2, 3 / 4)}
    if limits.whole and "actor_training" in limits.layouts:
        found = {world_size(layout) for layout in limits.layouts["actor_training"]}
    return sorted(at for at in found if 0 < at < slot.gpus)


def _together(slot: Share, rest: Slots, pool: Pool, limits: Limits) -> Iterator[Candidate]:
    everywhere = (slot, *rest)
    # On a manifest's groups, every placement that shares the trainers' GPUs is called Flattening.
    flat = limits if limits.whole else replace(limits, apart=tuple(a for a in limits.apart if not a))
    for actor, critic, note in _training(slot, pool, flat):
        yield Candidate(Placement.FLATTENING, everywhere, actor, critic, everywhere, everywhere, everywhere, note=note)
    first, second = _in_order(everywhere, limits) if limits.whole else _halves(everywhere, pool)
    if not (first and second):
        return
    for actor, critic, note in _training(slot, pool, limits):
        note = "; ".join([HALVES, *([note] if note else [])])
        yield Candidate(Placement.INTERLEAVING, everywhere, actor, critic, first, second, second, note=note)


def _halves(slots: Slots, pool: Pool) -> tuple[Slots, Slots]:
    """Divides each slot into two parts of about the same size. A slot of one GPU goes to the smaller part."""
    parts: tuple[list[Share], list[Share]] = [], []
    for slot in slots:
        unit = pool.per_node if slot.pool == pool.name and slot.gpus >= 2 * pool.per_node else 1
        at = slot.gpus // 2 // unit * unit
        if at:
            for part, half in zip(parts, slot.cut(at), strict=True):
                part.append(half)
        else:
            min(parts, key=lambda p: sum(s.gpus for s in p)).append(slot)
    return tuple(parts[0]), tuple(parts[1])


def _in_order(slots: Slots, limits: Limits) -> tuple[Slots, Slots]:
    """The GPUs of the first half of all servers, in the order of the groups, and the GPUs of the other servers
    (`dovetail.planner.placement.scorers` divides them so)."""
    parts: tuple[list[Share], list[Share]] = [], []
    left = sum(slot.gpus // limits.servers.get(slot.pool, 1) for slot in slots) // 2
    for slot in slots:
        size = limits.servers.get(slot.pool, 1)
        mine = min(left, slot.gpus // size)
        left -= mine
        for part, piece in zip(parts, slot.cut(mine * size), strict=True):
            if piece.gpus:
                part.append(piece)
    return tuple(parts[0]), tuple(parts[1])


def _separate(
    training: Share, segments: Slots, inventory: Inventory, limits: Limits, grid: Sizes
) -> Iterator[Candidate]:
    pool = inventory[training.pool]
    for actor, critic, divided in _training(training, pool, limits):
        for generation, inference, away in _served(training, segments, inventory, limits, grid):
            note = "; ".join(n for n in (divided, away) if n)
            whole = Candidate(
                Placement.SEPARATION, generation, actor, critic, inference, inference, inference, note=note
            )
            yield whole
            # A manifest with such groups calls it Interleaving, because its groups are apart anyway.
            kind = Placement.INTERLEAVING if limits.together else Placement.SEPARATION
            alone = "" if limits.whole or not limits.together else ALONE
            own = inventory[inference[0].pool]
            first, second = _in_order(inference, limits) if limits.whole else _halves(inference, own)
            if first and second:
                note = "; ".join(n for n in (alone, note, HALVES) if n)
                yield replace(whole, placement=kind, reference=first, reward=second, critic=second, note=note)


def _served(
    training: Share, segments: Slots, inventory: Inventory, limits: Limits, grid: Sizes
) -> Iterator[tuple[Slots, Slots, str]]:
    """The GPUs of generation and of inference, with a note. They are the same segments, different segments, or parts of
    the only segment."""
    yield segments, segments, ""
    if limits.whole:
        return
    if limits.together:
        for used in product((True, False), repeat=len(segments)):
            if some := tuple(s for s, use in zip(segments, used, strict=True) if use):
                yield some, some, ""
        return
    for uses in product(("both", "generation", "inference"), repeat=len(segments)):
        generation = tuple(s for s, use in zip(segments, uses, strict=True) if use != "inference")
        inference = tuple(s for s, use in zip(segments, uses, strict=True) if use != "generation")
        if generation and inference:
            yield generation, inference, "inference apart from generation" if generation != inference else ""
    if len(segments) == 1 and segments[0].gpus > 1:
        for count in grid(inventory[segments[0].pool], segments[0].gpus):
            if 2 * count <= segments[0].gpus:
                first, second = segments[0].cut(segments[0].gpus - count)
                yield (first,), (second,), "inference apart from generation"
    yield segments, (training,), "inference on the trainers"
