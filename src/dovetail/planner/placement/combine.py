"""Combinations of layouts that are worth an estimate of the whole iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from dovetail.planner.candidate import INFERENCE, TRAINING, Share, Task
from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.placement.filling import Filling
from dovetail.planner.placement.limits import Limits
from dovetail.planner.placement.ranking import Ranked, Ranker, Ranking, frugality, orders

# Of a structure's fastest combinations, those that are estimated, and those that are looked at for them.
COMBINATIONS = 8
PATIENCE = 200
AT_ONCE = 32

Chosen = tuple[Share, ...]
"""A share for each of a ranking's places."""


class Combiner:
    """Combines the layouts that `ranker` finds."""

    def __init__(self, limits: Limits, costs: GPUCosts, ranker: Ranker) -> None:
        self._limits, self._costs, self._ranker = limits, costs, ranker
        self._alone: dict[tuple[Task, Share], Option] = {}

    def few(self, ranking: Ranking) -> Iterator[Chosen]:
        """The fastest combination if it fits. Otherwise those that fit after the fewest changes."""
        filling = self.filling(ranking)
        first = next(self._agreeing(ranking, filling, 1), None)
        if first is not None:
            yield first
        else:
            yield from self._repaired(ranking, filling)

    def many(self, ranking: Ranking) -> list[Chosen]:
        """The fastest combinations, those of `few`, and those that leave few weights to move; each once."""
        filling = self.filling(ranking)
        found = [*islice(self._agreeing(ranking, filling, PATIENCE), COMBINATIONS)]
        return list(dict.fromkeys([*found, *self._repaired(ranking, filling), *self._aligned(ranking)]))

    def filling(self, ranking: Ranking) -> Filling:
        return Filling(ranking, self._costs)

    def fits(self, ranking: Ranking, filling: Filling, chosen: Chosen) -> bool:
        """Whether a combination can run and fits, as far as that is known without an estimate of everything."""
        if not self.agrees(ranking, chosen):
            return False
        options = []
        for (task, _), share in zip(ranking.places, chosen, strict=True):
            if (task, share) not in self._alone:
                self._alone[task, share] = self._costs.option(task, share)
            options.append(self._alone[task, share])
        return filling.fits(options)

    def agrees(self, ranking: Ranking, chosen: Sequence[Share]) -> bool:
        """Whether a combination can run: actor and critic have one micro-batch size and one tp, inference takes
        whole servers, and a scorer's stages are in its server's pod."""
        if not self._limits.together:
            return True
        placed = list(zip(ranking.places, chosen, strict=True))
        sizes = {share.pool: share.pp * share.tp for (task, _), share in placed if task == "generation"}
        whole = all(
            slot.count % sizes.get(slot.pool, 1) == 0 and share.pp * share.tp <= sizes.get(slot.pool, 1)
            for (task, slot), share in placed
            if task in INFERENCE
        )
        return whole and len({_common(share) for (task, _), share in placed if task in TRAINING}) == 1

    def least(self, ranking: Ranking) -> Chosen | None:
        """The combination that needs least memory for each task, and so fits if any does. One for each micro-batch
        size and tp is tried, and the first that can run is taken."""
        for common in (None, *_commons(ranking)):
            chosen = []
            for (task, _), ranked in zip(ranking.places, ranking.layouts, strict=True):
                mine = [o for o in ranked if common is None or task not in TRAINING or _common(o.share) == common]
                if mine:
                    chosen.append(min(mine, key=frugality).share)
            if len(chosen) == len(ranking.places) and self.agrees(ranking, chosen):
                return tuple(chosen)
        return None

    def _agreeing(self, ranking: Ranking, filling: Filling, patience: int) -> Iterator[Chosen]:
        coming = islice(orders(ranking.layouts), patience)
        while some := list(islice(coming, AT_ONCE)):
            for at, fits in zip(some, filling.fitting(ranking.layouts, some), strict=True):
                if fits:
                    chosen = tuple(ranked[i].share for ranked, i in zip(ranking.layouts, at, strict=True))
                    if self.agrees(ranking, chosen):
                        yield chosen

    def _repaired(self, ranking: Ranking, filling: Filling) -> Iterator[Chosen]:
        """Combinations that fit after replacements. Where both trainings must have the same micro-batch size and tp,
        one for each."""
        for common in (None, *_commons(ranking)) if self._limits.together else (None,):
            layouts = [
                ranked
                if common is None or task not in TRAINING
                else [option for option in ranked if _common(option.share) == common]
                for (task, _), ranked in zip(ranking.places, ranking.layouts, strict=True)
            ]
            found = filling.repaired(layouts)
            if found is not None and self.agrees(ranking, chosen := tuple(o.share for o in found)):
                yield chosen

    def _aligned(self, ranking: Ranking) -> Iterator[Chosen]:
        """Where all tasks train and generate on the same GPUs: each layout for both, because then no weights move."""
        structure = ranking.structure
        if structure.apart or structure.generation != structure.actor_training:
            return
        wide = self._ranker.rank(structure, width=10**9)
        assert isinstance(wide, Ranking)
        filling, tasks = self.filling(wide), [task for task, _ in wide.places]
        by_layout = [_by_layout(ranked) for ranked in wide.layouts]
        for layout in by_layout[tasks.index("actor_training")]:
            for shared in ((*TRAINING, "generation", "critic"), (*TRAINING, "generation")):
                layouts = [
                    mine[layout] if task in shared and layout in mine else ranked
                    for task, ranked, mine in zip(tasks, wide.layouts, by_layout, strict=True)
                ]
                found = filling.repaired(layouts)
                if found is not None and self.agrees(wide, chosen := tuple(o.share for o in found)):
                    yield chosen


def _common(share: Share) -> tuple[int, int]:
    """What actor and critic must have in common to train on the same GPUs: micro-batch size and tp."""
    return share.micro_batch, share.tp


def _commons(ranking: Ranking) -> list[tuple[int, int]]:
    """Values of `_common` that every training can have."""
    each = [
        {_common(o.share) for o in ranked}
        for (task, _), ranked in zip(ranking.places, ranking.layouts, strict=True)
        if task in TRAINING
    ]
    return sorted(set.intersection(*each), key=lambda common: (common[1], common[0]))


def _by_layout(ranked: Ranked) -> dict[tuple[int, int], Ranked]:
    """By (pp, tp)."""
    found: dict[tuple[int, int], Ranked] = {}
    for option in ranked:
        found.setdefault((option.share.pp, option.share.tp), []).append(option)
    return found
