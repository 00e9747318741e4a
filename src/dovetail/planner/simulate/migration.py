"""Where the remaining samples go: fewest destinations that hold them, those with most samples first (section 4.2)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dovetail.planner.simulate.profile import StageProfile

S = TypeVar("S", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741 - an instance's name


@dataclass(frozen=True)
class MigrationPlan(Generic[S, I]):
    """`destinations` keep their samples and take the `moves` (sample -> destination); `freed` generate no more."""

    destinations: tuple[I, ...]
    freed: tuple[I, ...]
    moves: dict[S, I]


def plan_migration(
    unfinished: Sequence[tuple[S, I | None]], profiles: Mapping[I, StageProfile], kv_per_sample: int
) -> MigrationPlan[S, I] | None:
    """`unfinished`: (sample, its instance or None while it waits for one), in the order in which they are to be placed.

    `profiles`: of every instance that may generate; `kv_per_sample`: tokens of the longest sample there can be. A
    destination is given no sample beyond its BS_max or its KV memory; ties go by the order of `profiles`. None if
    that frees no instance."""
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
