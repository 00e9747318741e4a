"""Divisions of the trainer ranks: some for the actor alone, the others for the critic.

A model keeps its data-parallel size where it can, so that its micro-batches, and with them its gradients, are the same
bits as on all ranks; it has fewer pipeline stages instead."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.planner.placement.limits import every_layout
from dovetail.protocol.plan import Layout


def divisions(layouts: Mapping[str, Parallelism], micro_batches: int) -> list[dict[str, Layout]]:
    """Layouts of actor and critic side by side, those alone that change fewest data-parallel sizes.

    `layouts`: those on all ranks. `micro_batches` of a mini-batch, which data-parallel ranks share evenly. A model
    never has more pipeline stages than in `layouts`. Empty where the ranks cannot be divided."""
    world, tp = world_size(layouts["actor"]), layouts["actor"].tp
    found: list[tuple[int, dict[str, Layout]]] = []
    for ranks in range(tp, world, tp):
        actor = _part(layouts["actor"], ranks // tp, micro_batches)
        critic = _part(layouts["critic"], (world - ranks) // tp, micro_batches)
        if actor is None or critic is None:
            continue
        changed = (actor.dp != layouts["actor"].dp) + (critic.dp != layouts["critic"].dp)
        found.append((changed, {"actor": actor, "critic": critic.model_copy(update={"first": ranks})}))
    if not found:
        return []
    found.sort(key=lambda each: each[0])
    _, best = next(groupby(found, key=lambda each: each[0]))
    return [each for _, each in best]


def same_batches(layouts: Mapping[str, Parallelism], division: Mapping[str, Layout]) -> bool:
    """Whether every data-parallel rank has the micro-batches that it has in `layouts`."""
    return all(division[name].dp == layouts[name].dp for name in ("actor", "critic"))


def _part(whole: Parallelism, ranks: int, micro_batches: int) -> Layout | None:
    """The model on `ranks` tensor-parallel groups of its own: with its dp, else with as few stages as can be."""
    found = [each for each in every_layout(ranks, (1,), whole.pp) if micro_batches % each.dp == 0]
    best = min(found, key=lambda each: each.dp != whole.dp, default=None)
    return None if best is None else Layout(pp=best.pp, dp=best.dp, tp=whole.tp)
