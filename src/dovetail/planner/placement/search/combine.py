"""Finds combinations of layouts that fit on their GPUs together and are worth an estimate of the whole iteration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.planner.candidate import INFERENCE, TRAINING, Share, Task, cells, side_by_side
from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.placement.search.ranking import EVERY, Ranked, Ranker, Ranking, orders

# The number of a structure's fastest combinations that are estimated, and the number that are checked to find them.
COMBINATIONS = 8
PATIENCE = 200
AT_ONCE = 32
# A change costs at least so many seconds, so that one without a cost is not infinitely good.
LEAST_SECONDS = 1e-6
# Smaller savings do not count, because sums in another order differ by as much.
LEAST_BYTES = 1024.0

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Chosen = tuple[Share, ...]
"""A share for each of a ranking's places."""


class Combiner:
    """Combines the layouts that `ranker` finds."""

    def __init__(self, costs: GPUCosts, ranker: Ranker) -> None:
        self._costs, self._ranker = costs, ranker

    def few(self, ranking: Ranking) -> Iterator[Chosen]:
        """The fastest combination if it fits. Otherwise those that fit after the fewest changes."""
        filling = self.filling(ranking)
        first = next(self._agreeing(ranking, filling, 1), None)
        if first is not None:
            yield first
        else:
            yield from self._repaired(ranking, filling)

    def many(self, ranking: Ranking) -> list[Chosen]:
        """The fastest combinations, those of `few`, and those with few weights to move, each once."""
        filling = self.filling(ranking)
        found = [*islice(self._agreeing(ranking, filling, PATIENCE), COMBINATIONS)]
        return list(dict.fromkeys([*found, *self._repaired(ranking, filling), *self._aligned(ranking)]))

    def filling(self, ranking: Ranking) -> Filling:
        return Filling(ranking, self._costs)

    def fits(self, ranking: Ranking, filling: Filling, chosen: Chosen) -> bool:
        """Whether a combination can run and fits, as far as that is known without an estimate of everything."""
        return self.agrees(ranking, chosen) and self._fit(ranking, filling, chosen)

    def beside(self, actor: Share, critic: Share) -> tuple[Share, Share]:
        """The shares of actor and critic as trainers lay them out. They share no schedule if micro-batches are cut by
        tokens."""
        cut = self._costs.work.micro_batch_tokens is not None
        return (actor, critic) if cut else side_by_side(actor, critic)

    def _fit(self, ranking: Ranking, filling: Filling, chosen: Sequence[Share]) -> bool:
        placed = self._laid_out(ranking, chosen)
        return filling.fits([self._costs.option(task, s) for (task, _), s in zip(ranking.places, placed, strict=True)])

    def _laid_out(self, ranking: Ranking, chosen: Sequence[Share]) -> list[Share]:
        """The shares of a combination, with those of actor and critic as `beside` lays them out."""
        found = list(chosen)
        trained = [at for at, (task, _) in enumerate(ranking.places) if task in TRAINING]
        if len(trained) == 2 and not ranking.structure.dedicated:
            first, second = trained
            found[first], found[second] = self.beside(found[first], found[second])
        return found

    def _fits_side_by_side(self, ranking: Ranking, filling: Filling, chosen: Sequence[Share]) -> bool:
        """Whether a combination fits if actor and critic have different numbers of stages. Its options fit alone."""
        return self._laid_out(ranking, chosen) == list(chosen) or self._fit(ranking, filling, chosen)

    def agrees(self, ranking: Ranking, chosen: Sequence[Share]) -> bool:
        """Whether a combination can run. Actor and critic must have the same micro-batch size and tp. Inference must
        take whole servers. A scorer's stages must be in its server's pod, and so must the tensor-parallel ranks of
        trainers that share a server's GPUs."""
        placed = list(zip(ranking.places, chosen, strict=True))
        sizes = {share.pool: share.pp * share.tp for (task, _), share in placed if task == "generation"}
        whole = all(
            slot.gpus % sizes.get(slot.pool, 1) == 0 and share.pp * share.tp <= sizes.get(slot.pool, 1)
            for (task, slot), share in placed
            if task in INFERENCE
        )
        trained = [(slot, share) for (task, slot), share in placed if task in TRAINING]
        alike = len({_common(share) for _, share in trained}) == 1
        return whole and alike and all(_within_servers(slot, share.tp, placed) for slot, share in trained)

    def least(self, ranking: Ranking) -> Chosen | None:
        """The combination that keeps least of a GPU while other tasks work, and then needs least for each task. If any
        combination fits, this one does."""
        for layouts in self.alike(ranking):
            chosen = self._least(ranking, layouts)
            if chosen is None:
                continue
            filling = self.filling(ranking)
            if self._fits_side_by_side(ranking, filling, chosen):
                return chosen
            others = (self._least(ranking, alike) for alike in self._same_stages(ranking, layouts))
            return next((other for other in others if other and self._fit(ranking, filling, other)), chosen)
        return None

    def _least(self, ranking: Ranking, layouts: list[Ranked]) -> Chosen | None:
        if not all(layouts):
            return None
        return self._agreed(ranking, [min(each, key=lambda o: (not o.share.offload, o.need)) for each in layouts])

    def _agreed(self, ranking: Ranking, options: Sequence[Option] | None) -> Chosen | None:
        """The shares of these options if they can run together. None without options."""
        chosen = tuple(option.share for option in options or ())
        return chosen if options and self.agrees(ranking, chosen) else None

    def _same_stages(self, ranking: Ranking, layouts: list[Ranked]) -> Iterator[list[Ranked]]:
        """The layouts of each place with which actor and critic have the same number of stages, for each number."""
        trained = [at for at, (task, _) in enumerate(ranking.places) if task in TRAINING]
        if len(trained) < 2 or ranking.structure.dedicated:
            return
        for pp in sorted(set.intersection(*({o.share.pp for o in layouts[at]} for at in trained))):
            yield [[o for o in mine if o.share.pp == pp] if at in trained else mine for at, mine in enumerate(layouts)]

    def alike(self, ranking: Ranking) -> Iterator[list[Ranked]]:
        """The layouts of each place. All of them come first. Then come those with which actor and critic have the same
        micro-batch size and tp, for each pair that both can have. Servers on their GPUs must have pods that hold tp
        ranks."""
        yield list(ranking.layouts)
        trained = [task in TRAINING for task, _ in ranking.places]
        slots = [slot for task, slot in ranking.places if task in TRAINING]
        each = [
            {_common(option.share) for option in ranked}
            for ranked, training in zip(ranking.layouts, trained, strict=True)
            if training
        ]
        for common in sorted(set.intersection(*each), key=lambda common: (common[1], common[0])):
            alike = [
                [option for option in ranked if _common(option.share) == common] if training else ranked
                for ranked, training in zip(ranking.layouts, trained, strict=True)
            ]
            # This is a condition of `agrees`.
            for at, (task, slot) in enumerate(ranking.places):
                if task == "generation" and any(slot.overlaps(other) for other in slots):
                    alike[at] = [o for o in alike[at] if o.share.pp * o.share.tp % common[1] == 0]
            yield alike

    def _agreeing(self, ranking: Ranking, filling: Filling, patience: int) -> Iterator[Chosen]:
        coming = islice(orders(ranking.layouts), patience)
        while some := list(islice(coming, AT_ONCE)):
            for at, fits in zip(some, filling.fitting(ranking.layouts, some), strict=True):
                if fits:
                    found = [ranked[i] for ranked, i in zip(ranking.layouts, at, strict=True)]
                    chosen = self._agreed(ranking, found)
                    if chosen is not None and self._fits_side_by_side(ranking, filling, chosen):
                        yield chosen

    def _repaired(self, ranking: Ranking, filling: Filling) -> Iterator[Chosen]:
        """Combinations that fit after replacements. There is one for each pair of micro-batch size and tp, which actor
        and critic must have in common."""
        for layouts in self.alike(ranking):
            chosen = self._agreed(ranking, filling.repaired(layouts))
            if chosen is None:
                continue
            unlike = self._laid_out(ranking, chosen) != list(chosen)
            if not unlike or self._fit(ranking, filling, chosen):
                yield chosen
            for alike in self._same_stages(ranking, layouts) if unlike else ():
                if (chosen := self._agreed(ranking, filling.repaired(alike))) is not None:
                    yield chosen

    def _aligned(self, ranking: Ranking) -> Iterator[Chosen]:
        """If training and generation have the same GPUs: combinations with the same layout for both, because then no
        weights move."""
        structure = ranking.structure
        if structure.dedicated or structure.generation != structure.actor_training:
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
                chosen = self._agreed(wide, filling.repaired(layouts))
                if chosen is not None and self._fits_side_by_side(wide, filling, chosen):
                    yield chosen


def _within_servers(slot: Share, tp: int, placed: Iterable[tuple[tuple[Task, Share], Share]]) -> bool:
    """Whether each group of `tp` trainer ranks on `slot` is in one pod. If servers share the GPUs, each pod has one
    server."""
    return tp == 1 or all(
        server.pp * server.tp % tp == 0
        for (task, other), server in placed
        if task == "generation" and other.overlaps(slot)
    )


def _common(share: Share) -> tuple[int, int]:
    """The micro-batch size and tp, which actor and critic must have in common to train on the same GPUs."""
    return share.micro_batch, share.tp


# ------------------------------------------------------------ what fits together


@dataclass(frozen=True)
class _Cell:
    """Places that share GPUs. `room`: the bytes of one GPU for all of them. `serving`: the same if one of them
    generates."""

    places: tuple[int, ...]
    room: float
    serving: float


class Filling:
    """Knows which places of one ranking share a GPU, and checks what fits there together, without an estimate of the
    iteration."""

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
        return all(_excess(cell, [chosen[at].footprint for at in cell.places]) <= 0 for cell in self._cells)

    def fitting(self, layouts: Sequence[Ranked], orders: Sequence[tuple[int, ...]]) -> Bools:
        """Whether each of n combinations fits, (n,) bool. A combination holds the index of an option for each place."""
        chosen = np.array(orders)
        fits = np.ones(len(orders), dtype=bool)
        for cell in self._cells:
            fits &= _excess(cell, [self._table(layouts[at])[chosen[:, at]] for at in cell.places], *_ARRAYS) <= 0
        return fits

    def repaired(self, layouts: Sequence[Ranked]) -> list[Option] | None:
        """The fastest options, after replacing those that do not fit. Each step takes the replacement that saves most
        bytes for the seconds that it costs. None if no replacement helps any more. `layouts`: the options of each
        place, the fastest first."""
        if not all(layouts):
            return None
        chosen = [ranked[0] for ranked in layouts]
        for cell in self._cells:
            while (excess := _excess(cell, [chosen[at].footprint for at in cell.places])) > 0:
                best: tuple[float, int, int] = (0.0, 0, 0)
                for at in cell.places:
                    mine = self._table(layouts[at])
                    tried = [mine if place == at else chosen[place].footprint for place in cell.places]
                    saved = np.minimum(excess, excess - _excess(cell, tried, *_ARRAYS))
                    saved[saved <= LEAST_BYTES] = 0.0
                    value = saved / np.maximum(LEAST_SECONDS, mine.seconds - chosen[at].seconds)
                    highest = int(np.argmax(value))
                    if value[highest] > best[0]:
                        best = float(value[highest]), at, highest
                if best[0] == 0.0:
                    return None
                chosen[best[1]] = layouts[best[1]][best[2]]
        return chosen if self.fits(chosen) else None

    def _table(self, options: Ranked) -> _Table:
        # Lists are identified by their address. They are kept so that no other list gets the same address.
        if id(options) not in self._tables:
            prints = [o.footprint for o in options]
            kept, works, gradients, awake = (
                np.array([getattr(each, name) for each in prints]) for name in ("kept", "works", "gradients", "awake")
            )
            seconds = np.array([o.seconds for o in options])
            self._tables[id(options)] = options, _Table(seconds, kept, works, gradients, awake, prints[0].serves)
        return self._tables[id(options)][1]


class _Table(NamedTuple):
    """The options of a place: their seconds, and their footprints with an array in place of each number."""

    seconds: Floats
    kept: Floats
    works: Floats
    gradients: Floats
    awake: Bools
    serves: bool

    def __getitem__(self, i: Any) -> _Table:  # type: ignore[override]
        """The table of some of the options. `i`: indices."""
        return _Table(self.seconds[i], self.kept[i], self.works[i], self.gradients[i], self.awake[i], self.serves)


def _either(condition: bool, first: float, second: float) -> float:
    return first if condition else second


# `_excess` takes these functions for arrays.
_ARRAYS = np.maximum, np.where


def _excess(cell: _Cell, footprints: Sequence[Any], larger: Any = max, either: Any = _either) -> Any:
    """The bytes by which a GPU is too small. With 0 or less the options fit. A server that stays awake gets the memory
    that is left while the others work. A server that sleeps meanwhile gets all but what the others keep. While a model
    trains, the gradients of other models stay.

    `footprints`: a `Footprint` for each place, or a `_Table` of many at once."""
    kept = sum(f.kept for f in footprints)
    gradients = sum(f.gradients for f in footprints)
    works: Any = 0.0
    for f in footprints:
        works = larger(works, f.works + either(f.gradients > 0, gradients - f.gradients, 0.0))
    most = kept + works - cell.room
    for f in footprints:
        if f.serves:
            most = larger(most, kept + either(f.awake, works, f.works + gradients) - cell.serving)
    return most
