"""Lists which GPUs each task may get: every way to divide an inventory that the three placements allow (APP section
V-A)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from dovetail.manifest.sizes import world_size
from dovetail.planner.candidate import TASKS, Candidate, Placement, Share
from dovetail.planner.inventory import Inventory, Pool
from dovetail.planner.placement.search.limits import Limits
from dovetail.planner.workload import Workload

# The most nodes with which every size is tried. With more, a grid is tried, and the best sizes are refined by nodes.
EVERY_NODE = 16
HALVES = "reference and reward on halves"
DEDICATED = "actor and critic on dedicated GPUs"
ALONE = "training on GPUs of its own"


Slots = tuple[Share, ...]
"""The GPUs that a task may use, before it has a layout there."""
# A function of a pool and a number of its GPUs. It returns the smaller numbers at which to divide them.
Sizes = Callable[[Pool, int], list[int]]


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
    nodes, found = -(-count // pool.per_node), every_size(pool, count)
    if nodes <= EVERY_NODE:
        return found
    grid = _steps(nodes)
    return [size for size in found if size < pool.per_node or size // pool.per_node in grid]


def _steps(nodes: int) -> set[int]:
    """The grid: 1, 2, 3, 4, 6, 8, 12, 16, 24 ... nodes, and all nodes less these numbers."""
    grid = {b * 2**i for b in (2, 3) for i in range(nodes.bit_length())} | {1}
    return {n for n in grid if n < nodes} | {nodes - n for n in grid if n < nodes}


class Structures:
    """All structures of an inventory. A structure is a candidate whose shares have no layout yet. `grid`: gives the
    sizes at which a pool's GPUs are divided."""

    def __init__(self, inventory: Inventory, work: Workload, limits: Limits, grid: Sizes = sizes) -> None:
        self.inventory, self.work, self.limits, self.grid = inventory, work, limits, grid

    def every(self) -> Iterator[Candidate]:
        """All structures, each once and in a fixed order."""
        seen = set()
        missing: dict[str, Any] = {task: () for task in TASKS if self.work.model(task) is None}
        for found in self._all():
            kept = replace(found, **missing)
            if kept.placement is Placement.INTERLEAVING and not kept.reference and len(self.limits.placements) > 1:
                continue  # no model runs beside the reference
            if kept.placement in self.limits.placements and kept not in seen:
                seen.add(kept)
                yield kept

    def _all(self) -> Iterator[Candidate]:
        pools, limits = self.inventory.pools, self.limits
        trainable = [p for p in pools if limits.trainers is None or p.name in limits.trainers]
        # Without bfloat16, training runs in float32. Such pools train only if there is no other pool.
        trainable = [p for p in trainable if p.gpu.bf16] or trainable
        usable = [p for p in pools if limits.rollouts is None or p.name in limits.rollouts]
        for pool in trainable:
            whole = Share(pool.name, dp=pool.gpus)
            others = tuple(Share(p.name, dp=p.gpus) for p in usable if p.name != pool.name)
            if pool in usable:
                rests = [others, ()] if others and not limits.whole else [others]
                for rest in rests:
                    yield from self._together(whole, rest, pool)
            if limits.whole:
                if pool not in usable and others:
                    yield from self._separate(whole, others)
                continue
            for count in [*self.grid(pool, pool.gpus), pool.gpus]:
                training, left = whole.cut(count)
                segments = ((left,) if left.gpus and pool in usable else ()) + others
                if segments:
                    yield from self._separate(training, segments)

    def _training(self, slot: Share, pool: Pool, dedicated: Collection[bool]) -> Iterator[tuple[Slots, Slots, str]]:
        """Actor and critic on the same GPUs, or on two parts of them. `dedicated`: see `Limits`."""
        if False in dedicated or self.work.critic is None:
            yield (slot,), (slot,), ""
        if True in dedicated and self.work.critic is not None:
            for at in self._parts(slot, pool):
                actor, critic = slot.cut(at)
                yield (actor,), (critic,), DEDICATED

    def _parts(self, slot: Share, pool: Pool) -> list[int]:
        """The numbers of GPUs to try for the actor: about a quarter, a half and three quarters. For a manifest's
        trainers they are the numbers that its layouts allow."""
        unit = pool.per_node if slot.gpus > pool.per_node else 1
        found = {round(slot.gpus * share / unit) * unit for share in (1 / 4, 1 / 2, 3 / 4)}
        if self.limits.whole and "actor_training" in self.limits.layouts:
            found = {world_size(layout) for layout in self.limits.layouts["actor_training"]}
        return sorted(at for at in found if 0 < at < slot.gpus)

    def _together(self, slot: Share, rest: Slots, pool: Pool) -> Iterator[Candidate]:
        everywhere, dedicated = (slot, *rest), self.limits.dedicated
        # On a manifest's groups, every placement that shares the trainers' GPUs is called Flattening.
        flat = dedicated if self.limits.whole else tuple(d for d in dedicated if not d)
        for actor, critic, note in self._training(slot, pool, flat):
            tasks = (everywhere, actor, critic, everywhere, everywhere, everywhere)
            yield Candidate(Placement.FLATTENING, *tasks, note=note)
        first, second = self.halves(everywhere, pool)
        if not (first and second):
            return
        for actor, critic, note in self._training(slot, pool, dedicated):
            tasks = (everywhere, actor, critic, first, second, second)
            yield Candidate(Placement.INTERLEAVING, *tasks, note=joined(HALVES, note))

    def halves(self, slots: Slots, pool: Pool) -> tuple[Slots, Slots]:
        """Divides each slot into two parts of about the same size. A slot of one GPU goes to the smaller part. On a
        manifest's groups the first part has the GPUs of the first half of all servers, in the order of the groups
        (`dovetail.planner.candidate` divides them so)."""
        parts: tuple[list[Share], list[Share]] = [], []
        servers = self.limits.servers
        left = sum(slot.gpus // servers.get(slot.pool, 1) for slot in slots) // 2
        for slot in slots:
            if self.limits.whole:
                size = servers.get(slot.pool, 1)
                mine = min(left, slot.gpus // size)
                left, at = left - mine, mine * size
            else:
                unit = pool.per_node if slot.pool == pool.name and slot.gpus >= 2 * pool.per_node else 1
                at = slot.gpus // 2 // unit * unit
                if not at:
                    min(parts, key=lambda p: sum(s.gpus for s in p)).append(slot)
                    continue
            for part, piece in zip(parts, slot.cut(at), strict=True):
                if piece.gpus:
                    part.append(piece)
        return tuple(parts[0]), tuple(parts[1])

    def _separate(self, training: Share, segments: Slots) -> Iterator[Candidate]:
        for actor, critic, divided in self._training(training, self.inventory[training.pool], self.limits.dedicated):
            for generation, inference, away in self.served(training, segments):
                tasks = (generation, actor, critic, inference, inference, inference)
                whole = Candidate(Placement.SEPARATION, *tasks, note=joined(divided, away))
                yield whole
                first, second = self.halves(inference, self.inventory[inference[0].pool])
                if first and second:
                    yield self.halved(replace(whole, reference=first, reward=second, critic=second))

    def halved(self, structure: Candidate) -> Candidate:
        """A structure of Separation with reference and reward on halves, as a manifest names it. It calls it
        Interleaving, because training has its own groups anyway."""
        note = joined("" if self.limits.whole else ALONE, structure.note, HALVES)
        return replace(structure, placement=Placement.INTERLEAVING, note=note)

    def served(self, training: Share, segments: Slots) -> Iterator[tuple[Slots, Slots, str]]:
        """The GPUs of generation and of inference, with a note, if `training` trains. Both have the same segments."""
        yield segments, segments, ""
        if not self.limits.whole:
            for used in product((True, False), repeat=len(segments)):
                if some := tuple(s for s, use in zip(segments, used, strict=True) if use):
                    yield some, some, ""


def joined(*notes: str) -> str:
    """The notes that are not empty, as one."""
    return "; ".join(note for note in notes if note)
