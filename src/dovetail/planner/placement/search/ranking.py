"""Each task's layouts on the GPUs that a structure gives it, fastest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Share, Task
from dovetail.planner.costs.gpu import GPUCosts, Option
from dovetail.planner.hashing import known_share
from dovetail.planner.inventory import Pool
from dovetail.planner.placement.search.limits import MICRO_BATCHES, MOST_STAGES, Limits, every_layout
from dovetail.planner.placement.search.structures import apart
from dovetail.planner.shape import ModelShape
from dovetail.planner.workload import Workload

INFERENCE_MICRO_BATCH = 8
INFERENCE_MICRO_BATCHES = (1, 4)
# Fastest layouts of a task that are kept besides those that need less memory than any faster one.
WIDTH = 4
EVERY = 10**9
# Training that needs less of a GPU than this does nothing to need less.
ROOMY = 0.25
_EITHER = (False, True)

# Fastest first.
Ranked = list[Option]


@dataclass(frozen=True)
class Misfit:
    """Why no layout fits, one sentence. `need`: what the smallest layout needs, as a fraction of a GPU's memory."""

    problem: str
    need: float


@dataclass(frozen=True)
class Ranking:
    """A structure with the layouts of each task on each of its shares, fastest first, as if each share began at GPU 0.
    `guess`: seconds of the fastest layouts together. `bound`: no choice of layouts takes fewer seconds."""

    structure: Candidate
    places: tuple[tuple[Task, Share], ...]
    layouts: tuple[Ranked, ...]
    guess: float
    bound: float


class Ranker:
    """Ranks the layouts of tasks. It skips ways to save memory where there is plenty of memory."""

    def __init__(self, limits: Limits, costs: GPUCosts) -> None:
        self._limits, self._costs = limits, costs

    def rank(self, structure: Candidate, width: int = WIDTH) -> Ranking | Misfit:
        """The layouts of each task, or the reason why a task does not fit."""
        places, layouts = tuple(structure.placed), []
        trained = (*structure.actor_training, *structure.critic_training)
        fastest: dict[Task, float] = {}
        floors: dict[Task, float] = {}
        for task, slot in places:
            ranked = self._kept(task, slot, any(slot.overlaps(other) for other in trained), width)
            if isinstance(ranked, Misfit):
                return ranked
            layouts.append(ranked)
            for seconds, more in ((fastest, ranked[0].seconds), (floors, min(option.floor for option in ranked))):
                # Shares of a task work at the same time, each by its speed.
                rate = 1 / max(more, 1e-12) + (1 / seconds[task] if task in seconds else 0.0)
                seconds[task] = 1 / rate
        return Ranking(structure, places, tuple(layouts), _sum(structure, fastest), _sum(structure, floors))

    @known_share
    def _kept(self, task: Task, slot: Share, shared: bool, width: int) -> Ranked | Misfit:
        """The options of a task that are kept. Where actor and critic must have one tp, the best of each tp are
        kept."""
        ranked = self._fitting(task, slot, shared)
        if isinstance(ranked, Misfit):
            return ranked
        if not self._limits.together or task not in TRAINING:
            return _front(ranked, width)
        degrees = sorted({option.share.tp for option in ranked})
        kept = [o for tp in degrees for o in _front([o for o in ranked if o.share.tp == tp], width)]
        return sorted(kept, key=_by_seconds)

    @known_share
    def _fitting(self, task: Task, slot: Share, shared: bool) -> Ranked | Misfit:
        """Layouts that fit alone, fastest first. `shared`: the same GPUs also train."""
        pool = self._costs.inventory[slot.pool]
        alike = options(task, slot, shared, pool, self._costs.work, self._limits)
        found = [option for shares in alike for option in self.ways(task, shares)]
        if fits := sorted((o for o in found if o.problem is None), key=_by_seconds):
            return fits
        least = min(found, key=lambda option: option.need, default=None)
        if least is not None and least.problem is not None:
            return Misfit(least.problem, least.need / pool.gpu.memory)
        why = f"no layout of {task} on {slot.gpus} GPUs of {slot.pool} divides its batches and layers evenly"
        return Misfit(why, float("inf"))

    def ways(self, task: Task, shares: Sequence[Share]) -> list[Option]:
        """Options for shares that differ only in how they save memory. There is one if saving everything is not
        enough, and if there is plenty of memory there are only those that save nothing (of each ZeRO stage)."""
        least = self._costs.option(task, shares[-1])
        if least.problem is not None or len(shares) == 1:
            return [least]
        first = self._costs.option(task, shares[0])
        roomy = first.problem is None and first.need < ROOMY * self._costs.inventory[first.share.pool].gpu.memory
        if task in TRAINING and roomy:
            plain = [s for s in shares[1:] if not (s.recompute or s.offload)]
            return [first, *(self._costs.option(task, s) for s in plain)]
        return [first, *(self._costs.option(task, s) for s in shares[1:-1]), least]


def _by_seconds(option: Option) -> tuple[float, str]:
    return option.seconds, str(option.share)


def _sum(structure: Candidate, seconds: Mapping[Task, float]) -> float:
    """Seconds of generation, inference and training one after the other. Actor and critic train at once if they have
    different GPUs."""
    actor, critic = seconds["actor_training"], seconds.get("critic_training", 0.0)
    training = max(actor, critic) if apart(structure) else actor + critic
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


# ------------------------------------------------------------ every layout


def options(task: Task, slot: Share, shared: bool, pool: Pool, work: Workload, limits: Limits) -> Iterator[list[Share]]:
    """Every share of `task` on `slot` that the model's shape and the batch sizes allow, whether or not it fits. Shares
    that differ only in how they save memory come together, from the one that saves nothing to the one that saves most.

    `shared`: the same GPUs also train, so tasks beside the training may have to make room."""
    shape, _ = work.needed(task)
    # Tensor parallel degrees within a node.
    degrees = [
        t
        for t in range(1, min(pool.per_node, slot.gpus) + 1)
        if pool.per_node % t == 0 and slot.gpus % t == 0 and shape.heads % t == 0
    ]
    if task in TRAINING:
        yield from _training(task, slot, degrees, shape, work, limits)
    elif task == "generation":
        size = limits.servers.get(pool.name)
        ways = (True,) if pool.name in limits.asleep else _EITHER if shared else (False,)
        for tp, pp in _stages(shape, slot, degrees):
            if (
                size in (None, pp * tp)
                and not (limits.within and pool.per_node % (pp * tp))
                and pp <= limits.serving_pp
            ):
                dp = slot.gpus // (pp * tp)
                yield [Share(slot.pool, slot.first, pp, tp, dp, offload=asleep) for asleep in ways]
    else:
        servers = limits.servers.get(pool.name, 1)  # a scorer beside each, on some of its GPUs
        most = limits.servers.get(pool.name, pool.per_node) if limits.together else slot.gpus
        for tp, pp in _stages(shape, slot, degrees):
            if tp > limits.inference_tp or pp > limits.inference_pp or pp * tp > most:
                continue
            dp = slot.gpus // max(pp * tp, servers)
            # Stages have the less to wait for, the smaller the micro-batches are: a scorer's are a pp-th.
            least = (max(1, INFERENCE_MICRO_BATCH // pp),)
            for micro in least if pp == 1 or limits.together else INFERENCE_MICRO_BATCHES:
                # Beside a server that sleeps, the weights come from host memory.
                swap = (True,) if pool.name in limits.asleep else limits.swap
                yield [Share(slot.pool, slot.first, pp, tp, dp, micro, offload=swapped) for swapped in swap]


def _stages(shape: ModelShape, slot: Share, degrees: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(tp, pp) of a task that does not train. Numbers of pipeline stages are powers of two, because they are tried with
    everything else."""
    for tp in degrees:
        ranks = slot.gpus // tp
        most = min(shape.layers, ranks, MOST_STAGES)
        yield from ((tp, pp) for pp in (2**i for i in range(most.bit_length())) if pp <= most and ranks % pp == 0)


def _training(
    task: Task, slot: Share, degrees: Sequence[int], shape: ModelShape, work: Workload, limits: Limits
) -> Iterator[list[Share]]:
    """Every layout with every size of micro-batch that suits a mini-batch."""
    lora = work.actor_lora if task == "actor_training" else work.critic_lora  # adapters are not split
    micros = MICRO_BATCHES if limits.micro_batch is None else (limits.micro_batch,)
    splits = (t for t in degrees if t == 1 or (lora is None and not shape.split_problem(t)))
    # Comparing pydantic models takes too long here.
    allowed = {(layout.pp, layout.tp, layout.dp) for layout in limits.layouts.get(task, ())}
    for layout in every_layout(slot.gpus, splits, shape.layers):
        if task in limits.layouts and (layout.pp, layout.tp, layout.dp) not in allowed:
            continue
        if any(count % layout.dp for count in limits.batches.get(task, ())):
            continue
        # One rank shares nothing with others, whatever the stage.
        stages = limits.fsdp if layout.dp > 1 else (min(2, limits.fsdp[0]),)
        ways: list[Any] = list(product(stages, limits.recompute, limits.offload.get(task, _EITHER)))
        for micro in micros:
            if work.divides(layout.dp, micro):
                yield [Share(slot.pool, slot.first, layout.pp, layout.tp, layout.dp, micro, *way) for way in ways]
