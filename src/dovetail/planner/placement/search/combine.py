"""Finds combinations of layouts that fit on their GPUs together and are worth an estimate of the whole iteration, and
makes candidates of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Schedule, Share, Task, cells, side_by_side
from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.placement.search.ranking import EVERY, Ranked, Ranker, Ranking, orders

# The number of a structure's fastest combinations that are estimated, and the number that are checked to find them.
COMBINATIONS = 8
PATIENCE = 200
AT_ONCE = 32
# The least seconds that a change costs, so that one without a cost is not infinitely good.
LEAST_SECONDS = 1e-6
# Smaller savings do not count, because sums in another order differ by as much.
LEAST_BYTES = 1024.0

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Combination = tuple[Share, ...]
"""A share for each of a ranking's places."""


class Combinations:
    """Knows which combinations of one ranking's layouts fit, and makes candidates. `ranker`: finds further layouts."""

    def __init__(self, ranking: Ranking, ranker: Ranker) -> None:
        self.ranking = ranking
        self._costs, self._limits, self._ranker = ranker.costs, ranker.limits, ranker
        self._filling = Filling(ranking, ranker.costs)
        self._training = [at for at, (task, _) in enumerate(ranking.places) if task in TRAINING]
        # Whether actor and critic train on the same GPUs.
        self._together = len(self._training) == 2 and not ranking.structure.dedicated

    # ------------------------------------------------------------ what is worth an estimate

    def few(self) -> Iterator[Combination]:
        """The fastest combination if it fits. Otherwise those that fit after the fewest changes."""
        first = next(self._agreeing(1), None)
        if first is not None:
            yield first
        else:
            yield from self._repaired()

    def many(self) -> list[Combination]:
        """The fastest combinations, those of `few`, and those with few weights to move, each once."""
        found = islice(self._agreeing(PATIENCE), COMBINATIONS)
        return list(dict.fromkeys([*found, *self._repaired(), *self._aligned()]))

    def least(self) -> Combination | None:
        """The combination that keeps least of a GPU while other tasks work, and then needs least for each task. If any
        combination fits, this one does."""
        for layouts in self.alike():
            chosen = self._least(layouts)
            if chosen is None:
                continue
            if self._fits_side_by_side(chosen):
                return chosen
            others = (self._least(alike) for alike in self._same_stages(layouts))
            return next((other for other in others if other and self._fit(other)), chosen)
        return None

    def _least(self, layouts: list[Ranked]) -> Combination | None:
        if not all(layouts):
            return None
        return self._agreed([min(each, key=lambda o: (not o.share.offload, o.need)) for each in layouts])

    def _agreeing(self, patience: int) -> Iterator[Combination]:
        """The fastest combinations that fit, among the first `patience` ones."""
        layouts = self.ranking.layouts
        coming = islice(orders(layouts), patience)
        while some := list(islice(coming, AT_ONCE)):
            for at, fits in zip(some, self._filling.fitting(layouts, some), strict=True):
                if fits:
                    chosen = self._agreed([ranked[i] for ranked, i in zip(layouts, at, strict=True)])
                    if chosen is not None and self._fits_side_by_side(chosen):
                        yield chosen

    def _repaired(self) -> Iterator[Combination]:
        """Combinations that fit after replacements. There is one for each pair of micro-batch size and tp, which actor
        and critic must have in common."""
        for layouts in self.alike():
            chosen = self._agreed(self._filling.repaired(layouts))
            if chosen is None:
                continue
            unlike = self.laid_out(chosen) != list(chosen)
            if not unlike or self._fit(chosen):
                yield chosen
            for alike in self._same_stages(layouts) if unlike else ():
                if (chosen := self._agreed(self._filling.repaired(alike))) is not None:
                    yield chosen

    def _aligned(self) -> Iterator[Combination]:
        """Combinations with one layout for training and generation, if they share GPUs. Then no weights move."""
        structure = self.ranking.structure
        if structure.dedicated or structure.generation != structure.actor_training:
            return
        wide = self._ranker.rank(structure, EVERY)
        assert isinstance(wide, Ranking)
        mine, tasks = type(self)(wide, self._ranker), [task for task, _ in wide.places]
        by_layout: list[dict[tuple[int, int], Ranked]] = [{} for _ in tasks]
        for found_here, ranked in zip(by_layout, wide.layouts, strict=True):
            for option in ranked:
                found_here.setdefault((option.share.pp, option.share.tp), []).append(option)
        for layout in by_layout[tasks.index("actor_training")]:
            for shared in ((*TRAINING, "generation", "critic"), (*TRAINING, "generation")):
                layouts = [
                    here[layout] if task in shared and layout in here else ranked
                    for task, ranked, here in zip(tasks, wide.layouts, by_layout, strict=True)
                ]
                chosen = mine._agreed(mine._filling.repaired(layouts))
                if chosen is not None and mine._fits_side_by_side(chosen):
                    yield chosen

    # ------------------------------------------------------------ what can run together

    def fits(self, chosen: Combination) -> bool:
        """Whether a combination can run and fits, as far as that is known without an estimate of everything."""
        return self.agrees(chosen) and self._fit(chosen)

    def agrees(self, chosen: Combination) -> bool:
        """Whether a combination can run. Actor and critic must have the same micro-batch size and tp. Inference must
        take whole servers. A scorer's stages must be in its server's pod, and so must the tensor-parallel ranks of
        trainers that share a server's GPUs."""
        placed = list(zip(self.ranking.places, chosen, strict=True))
        sizes = {share.pool: share.pp * share.tp for (task, _), share in placed if task == "generation"}
        whole = all(
            slot.gpus % sizes.get(slot.pool, 1) == 0 and share.pp * share.tp <= sizes.get(slot.pool, 1)
            for (task, slot), share in placed
            if task in INFERENCE
        )
        trained = [(slot, share) for (task, slot), share in placed if task in TRAINING]
        alike = len({_common(share) for _, share in trained}) == 1
        return whole and alike and all(_within_servers(slot, share.tp, placed) for slot, share in trained)

    def _agreed(self, options: Sequence[Option] | None) -> Combination | None:
        """The shares of these options if they can run together. None without options."""
        chosen = tuple(option.share for option in options or ())
        return chosen if options and self.agrees(chosen) else None

    def _fit(self, chosen: Combination) -> bool:
        placed = zip(self.ranking.places, self.laid_out(chosen), strict=True)
        return self._filling.fits([self._costs.option(task, share) for (task, _), share in placed])

    def _fits_side_by_side(self, chosen: Combination) -> bool:
        """Whether a combination fits if actor and critic have different numbers of stages. Its options fit alone."""
        return self.laid_out(chosen) == list(chosen) or self._fit(chosen)

    def alike(self) -> Iterator[list[Ranked]]:
        """The layouts of each place. All of them come first. Then come those with which actor and critic have the same
        micro-batch size and tp, for each pair that both can have. Servers on their GPUs must have pods that hold tp
        ranks."""
        places, layouts = self.ranking.places, self.ranking.layouts
        yield list(layouts)
        each = [{_common(option.share) for option in layouts[at]} for at in self._training]
        for common in sorted(set.intersection(*each), key=lambda common: (common[1], common[0])):
            alike = list(layouts)
            for at in self._training:
                alike[at] = [option for option in alike[at] if _common(option.share) == common]
            # This is a condition of `agrees`.
            for at, (task, slot) in enumerate(places):
                if task == "generation" and any(slot.overlaps(places[other][1]) for other in self._training):
                    alike[at] = [o for o in alike[at] if o.share.pp * o.share.tp % common[1] == 0]
            yield alike

    def _same_stages(self, layouts: list[Ranked]) -> Iterator[list[Ranked]]:
        """The layouts of each place with which actor and critic have the same number of stages, for each number."""
        if self._together:
            for pp in sorted(set.intersection(*({o.share.pp for o in layouts[at]} for at in self._training))):
                yield [
                    [o for o in mine if o.share.pp == pp] if at in self._training else mine
                    for at, mine in enumerate(layouts)
                ]

    # ------------------------------------------------------------ the candidates

    def laid_out(self, chosen: Combination) -> list[Share]:
        """The shares as trainers lay them out. Actor and critic share no schedule if micro-batches are cut by
        tokens."""
        found = list(chosen)
        if self._together and self._costs.work.micro_batch_tokens is None:
            first, second = self._training
            found[first], found[second] = side_by_side(found[first], found[second])
        return found

    def candidate(self, chosen: Combination, schedule: Schedule) -> Candidate:
        """The structure with these shares, in the order of `places`, on their GPUs."""
        shares: dict[Task, list[Share]] = {}
        for (task, slot), share in zip(self.ranking.places, self.laid_out(chosen), strict=True):
            if task in INFERENCE:
                share = self.beside_servers(slot, share, shares["generation"])
            shares.setdefault(task, []).append(share.at(slot.first))
        return replace(
            self.ranking.structure,
            **{task: tuple(mine) for task, mine in shares.items()},  # type: ignore[arg-type]
            schedule=schedule,
            migration=self._limits.migrations[0],
            folded=self._limits.folded,
            beside=True,
        )

    def beside_servers(self, slot: Share, share: Share, servers: Sequence[Share]) -> Share:
        """The share of an inference task on `slot`, with a copy in the scorer of each server."""
        sizes = (server.pp * server.tp for server in servers if server.pool == slot.pool)
        copies = slot.gpus // next(sizes, 1)
        return share if share.dp == copies else replace(share, dp=copies)

    def schedules(self, chosen: Combination) -> Sequence[Schedule]:
        """The schedules by which the two trainings can share their GPUs."""
        if self.ranking.structure.dedicated:
            return ("Dedicated",)
        actor, critic = chosen[self._training[0]], chosen[self._training[-1]]
        if not self._together or critic.tp != actor.tp:
            return ("Serial",)
        high, low = max(actor.pp, critic.pp), min(actor.pp, critic.pp)
        return self._limits.schedules if high > 1 and high % low == 0 else ("Serial",)


def _within_servers(slot: Share, tp: int, placed: Iterable[tuple[tuple[Task, Share], Share]]) -> bool:
    """Whether each group of `tp` trainer ranks on `slot` is in one pod. If servers share the GPUs, each pod has one."""
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
    """Places that share GPUs. `room`: the bytes of one GPU for all of them. `serving`: the same if one generates."""

    places: tuple[int, ...]
    room: float
    serving: float


class Filling:
    """Knows which places of one ranking share a GPU, and checks what fits there, without an estimate."""

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
