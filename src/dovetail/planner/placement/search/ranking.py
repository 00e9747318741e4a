"""Ranks each task's layouts on the GPUs that a structure gives it, the fastest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dovetail.manifest.hashing import known_share
from dovetail.manifest.model_shape import ModelShape
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Share, Task
from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.inventory import Pool
from dovetail.planner.placement.search.limits import MICRO_BATCHES, MOST_STAGES, Limits, every_layout, tensor_degrees
from dovetail.planner.workload import Workload

INFERENCE_MICRO_BATCH = 8
# The number of a task's fastest layouts that are kept. All that need less memory than every faster one are kept too.
WIDTH = 4
EVERY = 10**9
# Training that needs less than this fraction of a GPU's memory does not try to need less.
ROOMY = 0.25
_EITHER = (False, True)

# The fastest comes first.
Ranked = list[Option]


@dataclass(frozen=True)
class Misfit:
    """Why no layout fits, as one sentence, and the smallest layout's need as a fraction of GPU memory."""

    problem: str
    need: float


@dataclass(frozen=True)
class Ranking:
    """A structure with the layouts of each task on each of its shares, the fastest first. The shares of the layouts
    begin at GPU 0. `places`: the tasks and their shares. `layouts`: the options of each place. `guess`: the seconds of
    the fastest layouts together. `bound`: no choice of layouts takes fewer seconds."""

    structure: Candidate
    places: tuple[tuple[Task, Share], ...]
    layouts: tuple[Ranked, ...]
    guess: float
    bound: float


class Ranker:
    """Ranks the layouts of tasks. If there is plenty of memory, it skips the ways to save memory."""

    def __init__(self, limits: Limits, costs: GPUCosts) -> None:
        self.limits, self.costs = limits, costs

    def rank(self, structure: Candidate, width: int = WIDTH) -> Ranking | Misfit:
        """The layouts of each task, or the reason why a task does not fit."""
        places, layouts = tuple(structure.placed), []
        fastest: dict[Task, float] = {}
        floors: dict[Task, float] = {}
        for task, slot in places:
            ranked = self._kept(task, slot, any(slot.overlaps(other) for other in structure.trained), width)
            if isinstance(ranked, Misfit):
                return ranked
            layouts.append(ranked)
            for seconds, more in ((fastest, ranked[0].seconds), (floors, min(option.floor for option in ranked))):
                # The shares of a task work at the same time, and each gets samples in proportion to its speed.
                rate = 1 / max(more, 1e-12) + (1 / seconds[task] if task in seconds else 0.0)
                seconds[task] = 1 / rate
        return Ranking(structure, places, tuple(layouts), _sum(structure, fastest), _sum(structure, floors))

    @known_share
    def _kept(self, task: Task, slot: Share, shared: bool, width: int) -> Ranked | Misfit:
        """The options of a task to keep. Actor and critic must have the same tp, so the best of each tp are kept."""
        ranked = self._fitting(task, slot, shared)
        if isinstance(ranked, Misfit):
            return ranked
        if task not in TRAINING:
            return front(ranked, width)
        degrees = sorted({option.share.tp for option in ranked})
        kept = [o for tp in degrees for o in front([o for o in ranked if o.share.tp == tp], width)]
        return sorted(kept, key=_by_seconds)

    @known_share
    def _fitting(self, task: Task, slot: Share, shared: bool) -> Ranked | Misfit:
        """The layouts that fit if nothing else runs there, the fastest first. `shared`: the same GPUs also train."""
        pool = self.costs.inventory[slot.pool]
        found = [option for shares in self.options(task, slot, shared, pool) for option in self.ways(task, shares)]
        if fits := sorted((o for o in found if o.problem is None), key=_by_seconds):
            return fits
        least = min(found, key=lambda option: option.need, default=None)
        if least is not None and least.problem is not None:
            return Misfit(least.problem, least.need / pool.gpu.memory)
        why = f"no layout of {task} on {slot.gpus} GPUs of {slot.pool} divides its batches and layers evenly"
        return Misfit(why, float("inf"))

    def options(self, task: Task, slot: Share, shared: bool, pool: Pool) -> Iterator[list[Share]]:
        """Every share of `task` on `slot` that the model's shape and the batch sizes allow, whether or not it fits.
        Each list holds shares that differ only in how they save memory. The first saves nothing and the last saves
        most. `shared`: the same GPUs also train, so that other tasks may have to free their memory."""
        limits, shape = self.limits, self.costs.work.needed(task)[0]
        size = limits.servers.get(pool.name)
        if task in TRAINING:
            yield from training_shares(task, slot, pool, shape, self.costs.work, limits)
        elif task == "generation":
            ways = (True,) if pool.name in limits.asleep else _EITHER if shared else (False,)
            for tp, pp in stages(shape, slot, serving_degrees(shape, slot, pool)):
                if size in (None, pp * tp) and pool.per_node % (pp * tp) == 0 and pp <= limits.serving_pp:
                    dp = slot.gpus // (pp * tp)
                    yield [Share(slot.pool, slot.first, pp, tp, dp, offload=asleep) for asleep in ways]
        else:
            for _, pp in stages(shape, slot, (1,)):
                if pp <= min(limits.inference_pp, size or pool.per_node):
                    # Beside each server there is a scorer, on some of its GPUs. A scorer divides its micro-batch by pp.
                    dp, micro = slot.gpus // max(pp, size or 1), max(1, INFERENCE_MICRO_BATCH // pp)
                    # If the server sleeps, the scorer's weights come from host memory.
                    yield [Share(slot.pool, slot.first, pp, 1, dp, micro, offload=pool.name in limits.asleep)]

    def ways(self, task: Task, shares: Sequence[Share]) -> list[Option]:
        """The options for `shares`, which differ only in how they save memory. The last one saves most. If even that
        one does not fit, it is the only option. If there is plenty of memory, the options that save nothing are
        returned, one for each ZeRO stage."""
        least = self.costs.option(task, shares[-1])
        if least.problem is not None or len(shares) == 1:
            return [least]
        first = self.costs.option(task, shares[0])
        roomy = first.problem is None and first.need < ROOMY * self.costs.inventory[first.share.pool].gpu.memory
        if task in TRAINING and roomy:
            plain = [s for s in shares[1:] if not (s.recompute or s.offload)]
            return [first, *(self.costs.option(task, s) for s in plain)]
        return [first, *(self.costs.option(task, s) for s in shares[1:-1]), least]


def _by_seconds(option: Option) -> tuple[float, str]:
    return option.seconds, str(option.share)


def _sum(structure: Candidate, seconds: Mapping[Task, float]) -> float:
    """The seconds of generation, inference and training one after the other. Actor and critic train at the same time if
    they have different GPUs."""
    actor, critic = seconds["actor_training"], seconds.get("critic_training", 0.0)
    training = max(actor, critic) if structure.dedicated else actor + critic
    return seconds["generation"] + training + sum(seconds.get(task, 0.0) for task in INFERENCE)


def front(ranked: Ranked, width: int) -> Ranked:
    """The `width` fastest options, and each option that needs less memory than every faster one. Options with
    `Share.offload` leave the GPU to other tasks between their turns, so they are compared among themselves."""
    kept = []
    least = {False: float("inf"), True: float("inf")}
    for count, option in enumerate(ranked):
        if count < width or option.need < least[option.share.offload]:
            kept.append(option)
        least[option.share.offload] = min(least[option.share.offload], option.need)
    return kept


def orders(layouts: Sequence[Ranked]) -> Iterator[tuple[int, ...]]:
    """Combinations of options by the sum of their seconds, the smallest first, each once. A combination holds the index
    of an option in each list."""
    start = (0,) * len(layouts)
    heap = [(sum(ranked[0].seconds for ranked in layouts), start, 0)]
    while heap:
        seconds, at, last = heapq.heappop(heap)
        yield at
        # A combination is reached from one other only: the last index that is not 0 is one smaller there.
        for k in range(last, len(layouts)):
            ranked, i = layouts[k], at[k]
            if i + 1 < len(ranked):
                more = seconds + ranked[i + 1].seconds - ranked[i].seconds
                heapq.heappush(heap, (more, (*at[:k], i + 1, *at[k + 1 :]), k))


# ------------------------------------------------------------ every layout


def serving_degrees(shape: ModelShape, slot: Share, pool: Pool) -> list[int]:
    """The tensor-parallel degrees of a task that does not train. The ranks are on one node."""
    degrees = range(1, min(pool.per_node, slot.gpus) + 1)
    return [t for t in degrees if pool.per_node % t == 0 and slot.gpus % t == 0 and shape.heads % t == 0]


def stages(shape: ModelShape, slot: Share, degrees: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The (tp, pp) of a task that does not train. Only powers of two are tried as pp, to limit the combinations."""
    for tp in degrees:
        ranks = slot.gpus // tp
        most = min(shape.layers, ranks, MOST_STAGES)
        yield from ((tp, pp) for pp in (2**i for i in range(most.bit_length())) if pp <= most and ranks % pp == 0)


def training_shares(
    task: Task, slot: Share, pool: Pool, shape: ModelShape, work: Workload, limits: Limits
) -> Iterator[list[Share]]:
    """Every layout of a training task, with every micro-batch size that divides a mini-batch."""
    degrees = tensor_degrees(shape, pool.per_node, work.lora(task))
    micros = MICRO_BATCHES if limits.micro_batch is None else (limits.micro_batch,)
    # Tuples are compared, because comparing pydantic models takes too long.
    allowed = {(layout.pp, layout.tp, layout.dp) for layout in limits.layouts.get(task, ())}
    for layout in every_layout(slot.gpus, degrees, shape.layers):
        if task in limits.layouts and (layout.pp, layout.tp, layout.dp) not in allowed:
            continue
        if any(count % layout.dp for count in limits.batches.get(task, ())):
            continue
        # One rank shares nothing with others, so all ZeRO stages are the same.
        stages = limits.fsdp if layout.dp > 1 else (min(2, limits.fsdp[0]),)
        ways: list[Any] = list(product(stages, limits.recompute, limits.offload.get(task, _EITHER)))
        for micro in micros:
            if work.divides(layout.dp, micro):
                yield [Share(slot.pool, slot.first, layout.pp, layout.tp, layout.dp, micro, *way) for way in ways]
