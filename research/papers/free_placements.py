"""The search without what our trainers and scorers cannot do: for the papers' systems, whose baselines place tasks in
more ways than ours. Actor and critic have micro-batches and tp of their own, servers and scorers go over several nodes,
scorers are tensor-parallel or away from the rollouts, and their weights may wait in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from dovetail.gpus.inventory import Pool
from dovetail.planner.candidate import TRAINING, Candidate, Schedule, Share, Task
from dovetail.planner.search import (
    HALVES,
    INFERENCE_MICRO_BATCH,
    Combination,
    Combinations,
    Effort,
    Limits,
    Misfit,
    Ranked,
    Ranker,
    Search,
    Slots,
    Structures,
    front,
    joined,
    serving_degrees,
    sizes,
    stages,
)
from dovetail.planner.seconds import GPUCosts

INFERENCE_MICRO_BATCHES = (1, 4)
AWAY = "inference apart from generation"


@dataclass(frozen=True)
class FreeLimits(Limits):
    """`inference_tp`: the most tensor-parallel ranks in inference. `swap`: the allowed values of `Share.offload` in
    inference."""

    fsdp: tuple[Literal[0, 1, 2, 3], ...] = (2, 3)
    inference_tp: int = 64
    swap: tuple[bool, ...] = (False, True)


class FreeRanker(Ranker):
    def __init__(self, limits: FreeLimits, costs: GPUCosts) -> None:
        super().__init__(limits, costs)
        self._free = limits

    def _kept(self, task: Task, slot: Share, shared: bool, width: int) -> Ranked | Misfit:
        ranked = self._fitting(task, slot, shared)
        return ranked if isinstance(ranked, Misfit) else front(ranked, width)

    def options(self, task: Task, slot: Share, shared: bool, pool: Pool) -> Iterator[Share]:
        if task in TRAINING:
            yield from super().options(task, slot, shared, pool)
            return
        limits, shape = self._free, self.costs.work.needed(task)[0]
        for tp, pp in stages(shape, slot, serving_degrees(shape, slot, pool)):
            dp = slot.gpus // (pp * tp)
            if task == "generation":
                if pp <= limits.serving_pp:
                    ways = (False, True) if shared else (False,)
                    yield from (Share(slot.pool, slot.first, pp, tp, dp, offload=asleep) for asleep in ways)
            elif tp <= limits.inference_tp and pp <= limits.inference_pp:
                # With smaller micro-batches the stages wait less.
                for micro in (INFERENCE_MICRO_BATCH,) if pp == 1 else INFERENCE_MICRO_BATCHES:
                    yield from (Share(slot.pool, slot.first, pp, tp, dp, micro, offload=swap) for swap in limits.swap)


class FreeCombinations(Combinations):
    def agrees(self, chosen: Combination) -> bool:
        return True

    def alike(self) -> Iterator[list[Ranked]]:
        yield list(self.ranking.layouts)

    def laid_out(self, chosen: Combination) -> list[Share]:
        return list(chosen)

    def beside_servers(self, slot: Share, share: Share, servers: Sequence[Share]) -> Share:
        return share

    def candidate(self, chosen: Combination, schedule: Schedule) -> Candidate:
        return replace(super().candidate(chosen, schedule), beside=False)


class FreeStructures(Structures):
    def halved(self, structure: Candidate) -> Candidate:
        return replace(structure, note=joined(structure.note, HALVES))

    def served(self, training: Share, segments: Slots) -> Iterator[tuple[Slots, Slots, str]]:
        """The same segments, different segments, or parts of the only segment."""
        yield segments, segments, ""
        for uses in product(("both", "generation", "inference"), repeat=len(segments)):
            generation = tuple(s for s, use in zip(segments, uses, strict=True) if use != "inference")
            inference = tuple(s for s, use in zip(segments, uses, strict=True) if use != "generation")
            if generation and inference:
                yield generation, inference, AWAY if generation != inference else ""
        if len(segments) == 1 and segments[0].gpus > 1:
            for count in sizes(self.inventory[segments[0].pool], segments[0].gpus):
                if 2 * count <= segments[0].gpus:
                    first, second = segments[0].cut(segments[0].gpus - count)
                    yield (first,), (second,), AWAY
        yield segments, (training,), "inference on the trainers"


class FreeSearch(Search):
    combine = FreeCombinations

    def __init__(self, limits: FreeLimits, costs: GPUCosts, effort: Effort) -> None:
        super().__init__(limits, costs, effort)
        self.ranker = FreeRanker(limits, costs)

    def structures(self) -> Iterator[Candidate]:
        return FreeStructures(self.costs.inventory, self.costs.work, self.limits).every()
