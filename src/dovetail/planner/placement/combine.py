"""Combinations of layouts that fit on their GPUs together and are worth an estimate of the whole iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from dovetail.planner.candidate import INFERENCE, TRAINING, Share, Task, cells
from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.placement.layouts import EVERY, Ranked, Ranker, Ranking, orders
from dovetail.planner.placement.limits import Limits
from dovetail.planner.placement.structures import apart

# Of a structure's fastest combinations, those that are estimated, and those that are looked at for them.
COMBINATIONS = 8
PATIENCE = 200
AT_ONCE = 32
# A change that costs no time is not infinitely good.
LEAST_SECONDS = 1e-6
# What sums in another order differ by is no saving.
LEAST_BYTES = 1024.0

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
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
            slot.gpus % sizes.get(slot.pool, 1) == 0 and share.pp * share.tp <= sizes.get(slot.pool, 1)
            for (task, slot), share in placed
            if task in INFERENCE
        )
        return whole and len({_common(share) for (task, _), share in placed if task in TRAINING}) == 1

    def least(self, ranking: Ranking) -> Chosen | None:
        """The combination that holds least of a GPU while other tasks work, and then needs least for each task. So it
        fits if any does."""
        for layouts in self._alike(ranking):
            if all(layouts):
                chosen = tuple(min(ranked, key=lambda o: (not o.share.offload, o.need)).share for ranked in layouts)
                if self.agrees(ranking, chosen):
                    return chosen
        return None

    def _alike(self, ranking: Ranking) -> Iterator[list[Ranked]]:
        """The layouts of each place: all, then those with which actor and critic have the same micro-batch size and tp,
        for each value that both can have."""
        yield list(ranking.layouts)
        trained = [task in TRAINING for task, _ in ranking.places]
        each = [
            {_common(option.share) for option in ranked}
            for ranked, training in zip(ranking.layouts, trained, strict=True)
            if training
        ]
        for common in sorted(set.intersection(*each), key=lambda common: (common[1], common[0])):
            yield [
                [option for option in ranked if _common(option.share) == common] if training else ranked
                for ranked, training in zip(ranking.layouts, trained, strict=True)
            ]

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
        for layouts in islice(self._alike(ranking), None if self._limits.together else 1):
            found = filling.repaired(layouts)
            if found is not None and self.agrees(ranking, chosen := tuple(o.share for o in found)):
                yield chosen

    def _aligned(self, ranking: Ranking) -> Iterator[Chosen]:
        """Where all tasks train and generate on the same GPUs: each layout for both, because then no weights move."""
        structure = ranking.structure
        if apart(structure) or structure.generation != structure.actor_training:
            return
        wide = self._ranker.rank(structure, EVERY)
        assert isinstance(wide, Ranking)
        filling, tasks = self.filling(wide), [task for task, _ in wide.places]
        by_layout: list[dict[tuple[int, int], Ranked]] = [{} for _ in tasks]
        for found_here, ranked in zip(by_layout, wide.layouts, strict=True):
            for option in ranked:
                found_here.setdefault((option.share.pp, option.share.tp), []).append(option)
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


# ------------------------------------------------------------ what fits together


@dataclass(frozen=True)
class _Cell:
    """Places that share GPUs. `room`: bytes of one GPU for all of them; `serving`: the same where one of them
    serves."""

    places: tuple[int, ...]
    room: float
    serving: float


class Filling:
    """Which places of one ranking share a GPU, and what fits there together, without an estimate of the iteration."""

    def __init__(self, ranking: Ranking, costs: GPUCosts) -> None:
        self._tables: dict[int, tuple[Ranked, _Table]] = {}
        self._cells: list[_Cell] = []
        for pool in dict.fromkeys(share.pool for _, share in ranking.places):
            mine = [at for at, (_, share) in enumerate(ranking.places) if share.pool == pool]
            pieces = cells([ranking.places[at][1].range for at in mine])
            for places in dict.fromkeys(tuple(mine[i] for i in on) for _, on in pieces):
                tasks = [ranking.places[at][0] for at in places]
                self._cells.append(_Cell(places, *costs.memory.rooms(tasks, costs.inventory[pool])))

    def fits(self, chosen: Sequence[Option]) -> bool:
        """Whether an option for each place fits with the others."""
        return all(_excess(cell, chosen) <= 0 for cell in self._cells)

    def fitting(self, layouts: Sequence[Ranked], orders: Sequence[tuple[int, ...]]) -> Bools:
        """(n,) whether each of n combinations fits. A combination has the number of an option for each place."""
        chosen = np.array(orders)
        fits = np.ones(len(orders), dtype=bool)
        for cell in self._cells:
            tables = [(self._table(layouts[at]), chosen[:, at]) for at in cell.places]
            kept = sum(table.kept[i] for table, i in tables)
            gradients = sum(table.gradients[i] for table, i in tables)
            works = np.max([table.works[i] + table.beside(gradients, i) for table, i in tables], axis=0)
            fits &= kept + works <= cell.room
            for table, i in tables:
                if table.serves:
                    fits &= kept + np.where(table.awake[i], works, table.works[i] + gradients) <= cell.serving
        return fits

    def repaired(self, layouts: Sequence[Ranked]) -> list[Option] | None:
        """The fastest options, after those that do not fit are replaced. Each step takes the replacement that saves
        most bytes for the seconds that it costs. None if no replacement helps any more. `layouts`: by place, the
        fastest first."""
        if not all(layouts):
            return None
        chosen = [ranked[0] for ranked in layouts]
        tables: dict[int, _Table] = {}
        for cell in self._cells:
            while (excess := _excess(cell, chosen)) > 0:
                best: tuple[float, int, int] = (0.0, 0, 0)
                for at in cell.places:
                    if at not in tables:
                        tables[at] = self._table(layouts[at])
                    saved = np.minimum(excess, excess - tables[at].excess(cell, at, chosen))
                    saved[saved <= LEAST_BYTES] = 0.0
                    value = saved / np.maximum(LEAST_SECONDS, tables[at].seconds - chosen[at].seconds)
                    highest = int(np.argmax(value))
                    if value[highest] > best[0]:
                        best = float(value[highest]), at, highest
                if best[0] == 0.0:
                    return None
                chosen[best[1]] = layouts[best[1]][best[2]]
        return chosen if self.fits(chosen) else None

    def _table(self, options: Ranked) -> _Table:
        # Lists are told apart by where they are, and kept so that they stay there.
        if id(options) not in self._tables:
            self._tables[id(options)] = options, _Table(options)
        return self._tables[id(options)][1]


class _Table:
    """The options of a place as arrays, to compute at once what each of them would change."""

    def __init__(self, options: Sequence[Option]) -> None:
        self.seconds: Floats = np.array([o.seconds for o in options])
        self.kept: Floats = np.array([o.footprint.kept for o in options])
        self.works: Floats = np.array([o.footprint.works for o in options])
        self.gradients: Floats = np.array([o.footprint.gradients for o in options])
        self.serves = options[0].footprint.serves
        self.awake = np.array([o.footprint.awake for o in options])

    def beside(self, gradients: Floats, i: npt.NDArray[np.int64]) -> Floats:
        """(n,) bytes of other models' gradients that are there while these options work: in training only. `gradients`:
        of all models."""
        mine = self.gradients[i]
        return np.where(mine > 0, gradients - mine, 0.0)

    def excess(self, cell: _Cell, at: int, chosen: Sequence[Option]) -> Floats:
        """Like `_excess`, for each of the options in place of the one at `at`."""
        others = [chosen[place].footprint for place in cell.places if place != at]
        kept = self.kept + sum(f.kept for f in others)
        theirs = sum(f.gradients for f in others)
        works = self.works + np.where(self.gradients > 0, theirs, 0.0)
        for f in others:
            works = np.maximum(works, f.works + (theirs - f.gradients + self.gradients if f.gradients else 0.0))
        most: Floats = kept + works - cell.room
        if self.serves:
            most = np.maximum(most, kept + np.where(self.awake, works, self.works + theirs) - cell.serving)
        for f in others:
            if f.serves:
                most = np.maximum(most, kept + (works if f.awake else f.works + theirs + self.gradients) - cell.serving)
        return most


def _excess(cell: _Cell, chosen: Sequence[Option]) -> float:
    """Bytes by which a GPU is too small; with 0 or less the options fit. A server that stays awake has what is left
    while the others work. A server that sleeps meanwhile has what they keep."""
    kept = works = 0.0
    gradients = sum(chosen[at].footprint.gradients for at in cell.places)
    server = None
    for at in cell.places:
        f = chosen[at].footprint
        kept += f.kept
        works = max(works, f.works + (gradients - f.gradients if f.gradients else 0.0))
        server = f if f.serves else server
    most = kept + works - cell.room
    if server is not None:
        most = max(most, kept + (works if server.awake else server.works + gradients) - cell.serving)
    return most
