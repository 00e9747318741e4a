"""Layouts of all tasks that fit on their GPUs together, found without an estimate of the whole iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.placement.ranking import Ranked, Ranking

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# A change that costs no time is not infinitely good.
LEAST_SECONDS = 1e-6
# What sums in another order differ by is no saving.
LEAST_BYTES = 1024.0


@dataclass(frozen=True)
class _Cell:
    """Places that share GPUs. `room`: bytes of one GPU for all of them; `serving`: the same where one of them
    serves."""

    places: tuple[int, ...]
    room: float
    serving: float


class Filling:
    """Which places of one ranking share a GPU, and what fits there together."""

    def __init__(self, ranking: Ranking, costs: GPUCosts) -> None:
        self._tables: dict[int, tuple[Ranked, _Table]] = {}
        self._cells = [
            _Cell(places, *costs.rooms((ranking.places[at][0] for at in places), costs.inventory[pool]))
            for pool, places in _cells(ranking)
        ]

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
            works = np.max([table.works[i] for table, i in tables], axis=0)
            fits &= kept + works <= cell.room
            for table, i in tables:
                if table.serves:
                    fits &= kept + np.where(table.awake[i], works, table.works[i]) <= cell.serving
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
        self.serves = options[0].footprint.serves
        self.awake = np.array([o.footprint.awake for o in options])

    def excess(self, cell: _Cell, at: int, chosen: Sequence[Option]) -> Floats:
        """Like `_excess`, for each of the options in place of the one at `at`."""
        others = [chosen[place].footprint for place in cell.places if place != at]
        kept = self.kept + sum(f.kept for f in others)
        works = np.maximum(self.works, max((f.works for f in others), default=0.0))
        most: Floats = kept + works - cell.room
        if self.serves:
            most = np.maximum(most, kept + np.where(self.awake, works, self.works) - cell.serving)
        for f in others:
            if f.serves:
                most = np.maximum(most, kept + (works if f.awake else f.works) - cell.serving)
        return most


def _excess(cell: _Cell, chosen: Sequence[Option]) -> float:
    """Bytes by which a GPU is too small; with 0 or less the options fit. A server that stays awake has what is left
    while the others work. A server that sleeps meanwhile has what they keep."""
    kept = works = 0.0
    server = None
    for at in cell.places:
        f = chosen[at].footprint
        kept += f.kept
        works = max(works, f.works)
        server = f if f.serves else server
    most = kept + works - cell.room
    if server is not None:
        most = max(most, kept + (works if server.awake else server.works) - cell.serving)
    return most


def _cells(ranking: Ranking) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Places that share GPUs, each set of them once."""
    seen = set()
    for pool in dict.fromkeys(slot.pool for _, slot in ranking.places):
        mine = [(at, slot) for at, (_, slot) in enumerate(ranking.places) if slot.pool == pool]
        for start, stop in pairwise(sorted({e for _, s in mine for e in (s.first, s.first + s.count)})):
            on = tuple(at for at, s in mine if s.first <= start and stop <= s.first + s.count)
            if on and (pool, on) not in seen:
                seen.add((pool, on))
                yield pool, on
