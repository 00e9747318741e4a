"""Each task's layouts on the GPUs that a structure gives it, fastest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.planner.candidate import INFERENCE, TASKS, TRAINING, Share, Task
from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.placement.limits import Limits
from dovetail.planner.placement.options import options
from dovetail.planner.placement.structures import Slot, Structure

# Fastest layouts of a task that are kept besides those that need less memory than any faster one.
WIDTH = 4
# Training that needs less of a GPU than this does nothing to need less.
ROOMY = 0.25

# Fastest first.
Ranked = list[Option]


@dataclass(frozen=True)
class Misfit:
    """Why no layout fits, one sentence. `need`: what the smallest layout needs, as a fraction of a GPU's memory."""

    problem: str
    need: float


@dataclass(frozen=True)
class Ranking:
    """A structure with the layouts of each task on each slot, fastest first, as if each slot began at GPU 0.
    `guess`: seconds of the fastest layouts together. `bound`: no choice of layouts takes fewer seconds."""

    structure: Structure
    places: tuple[tuple[Task, Slot], ...]
    layouts: tuple[Ranked, ...]
    guess: float
    bound: float


class Ranker:
    """Ranks the layouts of tasks. It skips ways to save memory where there is plenty of memory."""

    def __init__(self, limits: Limits, costs: GPUCosts) -> None:
        self._limits, self._costs, self._inventory = limits, costs, costs.inventory
        self._options: dict[tuple[object, ...], Ranked | Misfit] = {}

    def rank(self, structure: Structure, width: int = WIDTH) -> Ranking | Misfit:
        """The layouts of each task, or the reason why a task does not fit."""
        places = tuple((task, slot) for task in TASKS for slot in structure.slots(task))
        layouts = []
        for task, slot in places:
            ranked = self._task(structure, task, slot, width)
            if isinstance(ranked, Misfit):
                return ranked
            layouts.append(ranked)
        seconds: dict[Task, float] = {}
        floors: dict[Task, float] = {}
        for (task, _), ranked in zip(places, layouts, strict=True):
            _side_by_side(seconds, task, ranked[0].seconds)
            _side_by_side(floors, task, min(option.floor for option in ranked))
        return Ranking(structure, places, tuple(layouts), _sum(structure, seconds), _sum(structure, floors))

    def _task(self, structure: Structure, task: Task, slot: Slot, width: int) -> Ranked | Misfit:
        """Layouts that fit alone, fastest first. The same for equal slots elsewhere: shares begin at GPU 0."""
        start, shared = slot.at(0), structure.shares_trainers(slot)
        front = (task, start, shared, width)
        if front not in self._options:
            ranked = self._layouts(task, start, shared)
            self._options[front] = ranked if isinstance(ranked, Misfit) else self._kept(task, ranked, width)
        return self._options[front]

    def _kept(self, task: Task, ranked: Ranked, width: int) -> Ranked:
        """The options of a task that are kept. Where actor and critic must have one tp, the best of each tp are
        kept."""
        if not self._limits.together or task not in TRAINING:
            return _front(ranked, width)
        degrees = sorted({option.share.tp for option in ranked})
        kept = [o for tp in degrees for o in _front([o for o in ranked if o.share.tp == tp], width)]
        return sorted(kept, key=lambda option: (option.seconds, str(option.share)))

    def _layouts(self, task: Task, slot: Slot, shared: bool) -> Ranked | Misfit:
        key = (task, slot, shared)
        if key not in self._options:
            alike = options(task, slot, shared, self._inventory, self._costs.work, self._limits)
            found = [option for shares in alike for option in self.ways(task, shares)]
            fitting = [option for option in found if option.problem is None]
            fitting.sort(key=lambda option: (option.seconds, str(option.share)))
            where = f"{slot.count} GPUs of {slot.pool}"
            nothing = Misfit(f"no layout of {task} on {where} divides its batches and layers evenly", float("inf"))
            least = min(found, key=lambda option: option.need, default=None)
            if least and least.problem:
                nothing = Misfit(least.problem, least.need / self._inventory[slot.pool].gpu.memory)
            self._options[key] = fitting or nothing
        return self._options[key]

    def ways(self, task: Task, shares: Sequence[Share]) -> list[Option]:
        """Options for shares that differ only in how they save memory. There is one if saving everything is not
        enough, and if there is plenty of memory there are only those that save nothing (of each ZeRO stage)."""
        least = self._costs.option(task, shares[-1])
        if least.problem is not None or len(shares) == 1:
            return [least]
        first = self._costs.option(task, shares[0])
        roomy = first.problem is None and first.need < ROOMY * self._inventory[first.share.pool].gpu.memory
        if task in TRAINING and roomy:
            plain = [s for s in shares[1:] if not (s.recompute or s.offload)]
            return [first, *(self._costs.option(task, s) for s in plain)]
        return [first, *(self._costs.option(task, s) for s in shares[1:-1]), least]


def _side_by_side(seconds: dict[Task, float], task: Task, more: float) -> None:
    """Add a slot to the task's others: they work at the same time, each by its speed."""
    rate = 1 / max(more, 1e-12) + (1 / seconds[task] if task in seconds else 0.0)
    seconds[task] = 1 / rate


def _sum(structure: Structure, seconds: Mapping[Task, float]) -> float:
    """Seconds of generation, inference and training one after the other. Actor and critic train at once if they have
    different GPUs."""
    actor, critic = seconds["actor_training"], seconds.get("critic_training", 0.0)
    training = max(actor, critic) if structure.apart else actor + critic
    return seconds["generation"] + training + sum(seconds.get(task, 0.0) for task in INFERENCE)


def _front(ranked: Ranked, width: int) -> Ranked:
    """The `width` fastest options, and each option that needs less memory than every faster one. Options that leave
    the GPU to other tasks between their turns are compared among themselves."""
    kept = []
    least = {False: float("inf"), True: float("inf")}
    for count, option in enumerate(ranked):
        if count < width or option.need < least[option.share.offload]:
            kept.append(option)
        least[option.share.offload] = min(least[option.share.offload], option.need)
    return kept


def frugality(option: Option) -> tuple[bool, float]:
    """A sorting key: first what holds least of a GPU while other tasks work, then what needs least while it works
    itself."""
    return not option.share.offload, option.need


def orders(layouts: Sequence[Ranked]) -> Iterator[tuple[int, ...]]:
    """Combinations by the sum of their seconds, each once. A combination has the number of an option of each list."""
    start = (0,) * len(layouts)
    heap = [(sum(ranked[0].seconds for ranked in layouts), start, 0)]
    while heap:
        seconds, at, last = heapq.heappop(heap)
        yield at
        # Each is reached from the one whose last place that is not the first option is one step back.
        for k in range(last, len(layouts)):
            ranked, i = layouts[k], at[k]
            if i + 1 < len(ranked):
                more = seconds + ranked[i + 1].seconds - ranked[i].seconds
                heapq.heappush(heap, (more, (*at[:k], i + 1, *at[k + 1 :]), k))
