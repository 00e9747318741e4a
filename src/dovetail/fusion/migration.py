"""Decides where the remaining samples go. They take as few instances as can hold them. The instances with most samples
come first (RLHFuse section 4.2)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dovetail.fusion.profile import StageProfile

S = TypeVar("S", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741 - an instance's name


@dataclass(frozen=True)
class MigrationPlan(Generic[S, I]):
    """`destinations`: the instances that keep their samples and take others. `freed`: the instances that generate no
    more. `moves`: the destination of each sample that moves."""

    destinations: tuple[I, ...]
    freed: tuple[I, ...]
    moves: dict[S, I]


def plan_migration(
    unfinished: Sequence[tuple[S, I | None]], profiles: Mapping[I, StageProfile], kv_per_sample: int
) -> MigrationPlan[S, I] | None:
    """The migration that frees most instances. None if it frees no instance.

    `unfinished`: the samples in the order in which they are placed, each with its instance, or None while it waits for
    one. `profiles`: the profile of every instance that may generate. `kv_per_sample`: the tokens of the longest
    possible sample. A destination gets no more samples than BS_max, and no more than its KV cache holds. Among equal
    instances the first one of `profiles` is taken."""
    loads = Counter(owner for _, owner in unfinished if owner in profiles)
    order = sorted(profiles, key=lambda i: -loads[i])
    slots = {i: profiles[i].slots(kv_per_sample) for i in order}
    spare, elsewhere, count = 0, len(unfinished), 0
    for instance in order:
        if count and spare >= elsewhere:
            break
        count += 1
        spare += max(0, slots[instance] - loads[instance])
        elsewhere -= loads[instance]
    if count == len(order) or spare < elsewhere:
        return None
    destinations = order[:count]
    chosen, moves = set(destinations), {}
    heap = [((loads[i] + 1) / slots[i], k, loads[i] + 1) for k, i in enumerate(destinations) if loads[i] < slots[i]]
    heapq.heapify(heap)
    for sample, owner in unfinished:
        if owner in chosen:
            continue
        _, k, load = heapq.heappop(heap)
        moves[sample] = destinations[k]
        if load < slots[destinations[k]]:
            heapq.heappush(heap, ((load + 1) / slots[destinations[k]], k, load + 1))
    return MigrationPlan(tuple(destinations), tuple(i for i in profiles if i not in chosen), moves)
