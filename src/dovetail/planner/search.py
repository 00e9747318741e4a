"""Searches for the fastest placement that fits, with a beam and then a descent.

A structure says which task gets which GPUs. Structures are ranked by the fastest layouts of their tasks, each taken
alone. In that order, the best few combinations of layouts of each structure are estimated as whole iterations, until
a part of the effort is spent or time is up. At last the layouts of the best ones are varied one at a time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, Literal

from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.hashing import known_share
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import LoRA, Parallelism
from dovetail.planner.candidate import (
    INFERENCE,
    TASKS,
    TRAINING,
    Candidate,
    Placement,
    Schedule,
    Share,
    Task,
    cells,
    side_by_side,
)
from dovetail.planner.memory import Footprint
from dovetail.planner.seconds import Estimate, GPUCosts, Option
from dovetail.planner.workload import Workload

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MIGRATIONS = (None, 0.1, 0.2, 0.3)
# These are tried for the best placement, once it is found.
FINE_MIGRATIONS = tuple(k / 100 for k in range(5, 100, 5))
# The most pipeline stages of a server and in inference. Each adds a message, and far fewer make a stage's memory small.
MOST_STAGES = 16


@dataclass(frozen=True)
class Limits:
    """The choices of the search. An open choice may have any value that trainers and scorers run. Actor and critic have
    one micro-batch size and one tp. Each vLLM server has a pod, and a scorer beside it. The scorer's models are whole
    or in pipeline stages on the pod's GPUs, and stay there.

    `placements`, `schedules`, `migrations`: the allowed values of a candidate's fields.
    `trainers`, `rollouts`: the pools that may train, and those that may generate and infer. None: all pools. A pool in
    both is shared by all tasks or divided between them.
    `whole`: a task takes all of a pool, as the groups of a manifest do.
    `micro_batch`: `Share.micro_batch` of training. None: it is open.
    `batches`: by training task, the numbers of micro-batches of the model's other stages. Its data-parallel ranks must
    share them evenly.
    `layouts`: the allowed layouts by training task. A task that is not named may have any layout.
    `servers`: the GPUs of a vLLM server, by pool. It is open for a pool that is not named.
    `asleep`: the pools whose servers sleep while others use the GPU. Their scorers' weights wait in host memory then.
    `serving_pp`, `inference_pp`: the most pipeline stages of a vLLM server, and in inference.
    `fsdp`, `recompute`: the allowed values in training.
    `offload`: the allowed values by training task. It is open for a task that is not named.
    `folded`: the rollouts' log-probabilities serve as the old ones.
    `dedicated`: whether actor and critic may train on GPUs of their own (True) or on the same GPUs (False)."""

    placements: tuple[Placement, ...] = tuple(Placement)
    trainers: tuple[str, ...] | None = None
    rollouts: tuple[str, ...] | None = None
    whole: bool = False
    micro_batch: int | None = None
    batches: Mapping[Task, tuple[int, ...]] = field(default_factory=dict)
    layouts: Mapping[Task, tuple[Parallelism, ...]] = field(default_factory=dict)
    servers: Mapping[str, int] = field(default_factory=dict)
    asleep: tuple[str, ...] = ()
    serving_pp: int = MOST_STAGES
    inference_pp: int = MOST_STAGES
    fsdp: tuple[Literal[0, 1, 2, 3], ...] = (2,)
    recompute: tuple[bool, ...] = (False, True)
    offload: Mapping[Task, tuple[bool, ...]] = field(default_factory=dict)
    schedules: tuple[Schedule, ...] = ("Serial", "TimeSharing", "Fused")
    migrations: tuple[float | None, ...] = MIGRATIONS
    folded: bool = True
    dedicated: tuple[bool, ...] = (False, True)


# From so many tokens of a sample on, layouts are tried whose ranks share its tokens, so many of them.
LONG = 2**15
CONTEXTS = (1, 2, 4, 8, 16)
Degrees = Callable[[int], Sequence[int]]


def tensor_degrees(shape: ModelShape, per_node: int, lora: LoRA | None) -> list[int]:
    """The tensor-parallel degrees of a trained model. A degree stays within a node of `per_node` GPUs and cuts a layer
    into equal parts. Adapters with dropout are not split."""
    most = 1 if lora is not None and lora.dropout > 0 else per_node
    return [t for t in range(1, most + 1) if per_node % t == 0 and shape.split_problem(t) is None]


def context_degrees(shape: ModelShape | None, longest: int, asked: Collection[int] = ()) -> Degrees:
    """The context-parallel degrees of a model whose samples have at most `longest` tokens, by its tp: those `asked`
    for, or else, if samples are long, several. Its heads are cut into equal parts if the `shape` is known."""
    tried = sorted(asked) or (CONTEXTS if longest >= LONG else (1,))
    return lambda tp: [cp for cp in tried if shape is None or shape.share_problem(cp, tp) is None]


def every_layout(
    ranks: int, degrees: Iterable[int], layers: int, contexts: Degrees = lambda _: (1,), experts: Collection[int] = (1,)
) -> Iterator[Parallelism]:
    """Every layout over `ranks` ranks whose tp is one of `degrees`, with at most `layers` pipeline stages. `contexts`
    has the cp for a tp, and `experts` the ep."""
    for tp in degrees:
        for pp in range(1, min(layers, ranks // tp) + 1):
            if ranks % (pp * tp) == 0:
                dp = ranks // (pp * tp)
                shared = ((cp, ep) for cp in contexts(tp) for ep in experts if dp % cp == 0 and dp % ep == 0)
                yield from (Parallelism(pp=pp, tp=tp, dp=dp, cp=cp, ep=ep) for cp, ep in shared)


# The most nodes with which every size is tried. With more, a grid is tried.
EVERY_NODE = 16
HALVES = "reference and reward on halves"
DEDICATED = "actor and critic on dedicated GPUs"
ALONE = "training on GPUs of its own"


Slots = tuple[Share, ...]
"""The GPUs that a task may use, before it has a layout there."""


def part_sizes(pool: Pool) -> list[int]:
    """The numbers of a pool's GPUs to try for one of two models that divide the pool. On one node it is every number.
    On several nodes it is those of `sizes`, for either model."""
    found = range(1, pool.gpus) if pool.gpus <= pool.per_node else sizes(pool, pool.gpus)
    return sorted({*found, *(pool.gpus - size for size in found)})


def sizes(pool: Pool, count: int) -> list[int]:
    """The numbers of GPUs below `count` that are worth trying: powers of two within a node, and whole nodes. With many
    nodes only a grid of them is tried, which is finer towards both ends."""
    nodes, within = (
        -(-count // pool.per_node),
        {2**i for i in range(pool.per_node.bit_length()) if 2**i < pool.per_node},
    )
    tried = range(1, nodes + 1) if nodes <= EVERY_NODE else _steps(nodes)
    return sorted(s for s in {*within, *(n * pool.per_node for n in tried)} if s < count)


def _steps(nodes: int) -> set[int]:
    """The grid: 1, 2, 3, 4, 6, 8, 12, 16, 24 ... nodes, and all nodes less these numbers."""
    grid = {b * 2**i for b in (2, 3) for i in range(nodes.bit_length())} | {1}
    return {n for n in grid if n < nodes} | {nodes - n for n in grid if n < nodes}


class Structures:
    """All structures of an inventory. A structure is a candidate whose shares have no layout yet."""

    def __init__(self, inventory: Inventory, work: Workload, limits: Limits) -> None:
        self.inventory, self.work, self.limits = inventory, work, limits

    def every(self) -> Iterator[Candidate]:
        """All structures, each once and in a fixed order."""
        seen = set()
        missing: dict[str, Any] = {task: () for task in TASKS if self.work.model(task) is None}
        for found in self._all():
            kept = replace(found, **missing)
            if kept.placement is Placement.INTERLEAVING and not kept.reference and len(self.limits.placements) > 1:
                continue  # no model runs beside the reference
            if kept.placement in self.limits.placements and kept not in seen:
                seen.add(kept)
                yield kept

    def _all(self) -> Iterator[Candidate]:
        pools, limits = self.inventory.pools, self.limits
        trainable = [p for p in pools if limits.trainers is None or p.name in limits.trainers]
        # Without bfloat16, training runs in float32. Such pools train only if there is no other pool.
        trainable = [p for p in trainable if p.gpu.bf16] or trainable
        usable = [p for p in pools if limits.rollouts is None or p.name in limits.rollouts]
        for pool in trainable:
            whole = Share(pool.name, dp=pool.gpus)
            others = tuple(Share(p.name, dp=p.gpus) for p in usable if p.name != pool.name)
            if pool in usable:
                rests = [others, ()] if others and not limits.whole else [others]
                for rest in rests:
                    yield from self._together(whole, rest, pool)
            if limits.whole:
                if pool not in usable and others:
                    yield from self._separate(whole, others)
                continue
            for count in [*sizes(pool, pool.gpus), pool.gpus]:
                training, left = whole.cut(count)
                segments = ((left,) if left.gpus and pool in usable else ()) + others
                if segments:
                    yield from self._separate(training, segments)

    def _training(self, slot: Share, pool: Pool, dedicated: Collection[bool]) -> Iterator[tuple[Slots, Slots, str]]:
        """Actor and critic on the same GPUs, or on two parts of them. `dedicated`: see `Limits`."""
        if False in dedicated or self.work.critic is None:
            yield (slot,), (slot,), ""
        if True in dedicated and self.work.critic is not None:
            for at in self._parts(slot, pool):
                actor, critic = slot.cut(at)
                yield (actor,), (critic,), DEDICATED

    def _parts(self, slot: Share, pool: Pool) -> list[int]:
        """The numbers of GPUs to try for the actor: about a quarter, a half and three quarters. For a manifest's
        trainers they are the numbers that its layouts allow."""
        unit = pool.per_node if slot.gpus > pool.per_node else 1
        found = {round(slot.gpus * share / unit) * unit for share in (1 / 4, 1 / 2, 3 / 4)}
        if self.limits.whole and "actor_training" in self.limits.layouts:
            found = {world_size(layout) for layout in self.limits.layouts["actor_training"]}
        return sorted(at for at in found if 0 < at < slot.gpus)

    def _together(self, slot: Share, rest: Slots, pool: Pool) -> Iterator[Candidate]:
        everywhere, dedicated = (slot, *rest), self.limits.dedicated
        # On a manifest's groups, every placement that shares the trainers' GPUs is called Flattening.
        flat = dedicated if self.limits.whole else tuple(d for d in dedicated if not d)
        for actor, critic, note in self._training(slot, pool, flat):
            tasks = (everywhere, actor, critic, everywhere, everywhere, everywhere)
            yield Candidate(Placement.FLATTENING, *tasks, note=note)
        first, second = self.halves(everywhere, pool)
        if not (first and second):
            return
        for actor, critic, note in self._training(slot, pool, dedicated):
            tasks = (everywhere, actor, critic, first, second, second)
            yield Candidate(Placement.INTERLEAVING, *tasks, note=joined(HALVES, note))

    def halves(self, slots: Slots, pool: Pool) -> tuple[Slots, Slots]:
        """Divides each slot into two parts of about the same size. A slot of one GPU goes to the smaller part. On a
        manifest's groups the first part has the GPUs of the first half of all servers, in the order of the groups
        (`dovetail.planner.candidate` divides them so)."""
        parts: tuple[list[Share], list[Share]] = [], []
        servers = self.limits.servers
        left = sum(slot.gpus // servers.get(slot.pool, 1) for slot in slots) // 2
        for slot in slots:
            if self.limits.whole:
                size = servers.get(slot.pool, 1)
                mine = min(left, slot.gpus // size)
                left, at = left - mine, mine * size
            else:
                unit = pool.per_node if slot.pool == pool.name and slot.gpus >= 2 * pool.per_node else 1
                at = slot.gpus // 2 // unit * unit
                if not at:
                    min(parts, key=lambda p: sum(s.gpus for s in p)).append(slot)
                    continue
            for part, piece in zip(parts, slot.cut(at), strict=True):
                if piece.gpus:
                    part.append(piece)
        return tuple(parts[0]), tuple(parts[1])

    def _separate(self, training: Share, segments: Slots) -> Iterator[Candidate]:
        for actor, critic, divided in self._training(training, self.inventory[training.pool], self.limits.dedicated):
            for generation, inference, away in self.served(training, segments):
                tasks = (generation, actor, critic, inference, inference, inference)
                whole = Candidate(Placement.SEPARATION, *tasks, note=joined(divided, away))
                yield whole
                first, second = self.halves(inference, self.inventory[inference[0].pool])
                if first and second:
                    yield self.halved(replace(whole, reference=first, reward=second, critic=second))

    def halved(self, structure: Candidate) -> Candidate:
        """A structure of Separation with reference and reward on halves, as a manifest names it. It calls it
        Interleaving, because training has its own groups anyway."""
        note = joined("" if self.limits.whole else ALONE, structure.note, HALVES)
        return replace(structure, placement=Placement.INTERLEAVING, note=note)

    def served(self, training: Share, segments: Slots) -> Iterator[tuple[Slots, Slots, str]]:
        """The GPUs of generation and of inference, with a note, if `training` trains. Both have the same segments."""
        yield segments, segments, ""
        if not self.limits.whole:
            for used in product((True, False), repeat=len(segments)):
                if some := tuple(s for s, use in zip(segments, used, strict=True) if use):
                    yield some, some, ""


def joined(*notes: str) -> str:
    """The notes that are not empty, as one."""
    return "; ".join(note for note in notes if note)


INFERENCE_MICRO_BATCH = 8
# The number of a task's fastest layouts that are kept. All that need less memory than every faster one are kept too.
WIDTH = 4
EVERY = 10**9
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
    the fastest layouts together."""

    structure: Candidate
    places: tuple[tuple[Task, Share], ...]
    layouts: tuple[Ranked, ...]
    guess: float


class Ranker:
    """Ranks the layouts of tasks."""

    def __init__(self, limits: Limits, costs: GPUCosts) -> None:
        self.limits, self.costs = limits, costs

    def rank(self, structure: Candidate, width: int = WIDTH) -> Ranking | Misfit:
        """The layouts of each task, or the reason why a task does not fit."""
        places, layouts = tuple(structure.placed), []
        fastest: dict[Task, float] = {}
        for task, slot in places:
            ranked = self._kept(task, slot, any(slot.overlaps(other) for other in structure.trained), width)
            if isinstance(ranked, Misfit):
                return ranked
            layouts.append(ranked)
            # The shares of a task work at the same time, and each gets samples in proportion to its speed.
            rate = 1 / max(ranked[0].seconds, 1e-12) + (1 / fastest[task] if task in fastest else 0.0)
            fastest[task] = 1 / rate
        return Ranking(structure, places, tuple(layouts), _sum(structure, fastest))

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
        found = [self.costs.option(task, share) for share in self.options(task, slot, shared, pool)]
        if fits := sorted((o for o in found if o.problem is None), key=_by_seconds):
            return fits
        least = min(found, key=lambda option: option.need, default=None)
        if least is not None and least.problem is not None:
            return Misfit(least.problem, least.need / pool.gpu.memory)
        why = f"no layout of {task} on {slot.gpus} GPUs of {slot.pool} divides its batches and layers evenly"
        return Misfit(why, float("inf"))

    def options(self, task: Task, slot: Share, shared: bool, pool: Pool) -> Iterator[Share]:
        """Every share of `task` on `slot` that the model's shape and the batch sizes allow, whether or not it fits.
        `shared`: the same GPUs also train, so that other tasks may have to free their memory."""
        limits, shape = self.limits, self.costs.work.needed(task)[0]
        size = limits.servers.get(pool.name)
        if task in TRAINING:
            yield from training_shares(task, slot, pool, shape, self.costs.work, limits)
        elif task == "generation":
            ways = (True,) if pool.name in limits.asleep else _EITHER if shared else (False,)
            for tp, pp in stages(shape, slot, serving_degrees(shape, slot, pool)):
                if size in (None, pp * tp) and pool.per_node % (pp * tp) == 0 and pp <= limits.serving_pp:
                    dp = slot.gpus // (pp * tp)
                    yield from (Share(slot.pool, slot.first, pp, tp, dp, offload=asleep) for asleep in ways)
        else:
            for _, pp in stages(shape, slot, (1,)):
                if pp <= min(limits.inference_pp, size or pool.per_node):
                    # Beside each server there is a scorer, on some of its GPUs. A scorer divides its micro-batch by pp.
                    dp, micro = slot.gpus // max(pp, size or 1), max(1, INFERENCE_MICRO_BATCH // pp)
                    # If the server sleeps, the scorer's weights come from host memory.
                    yield Share(slot.pool, slot.first, pp, 1, dp, micro, offload=pool.name in limits.asleep)


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
) -> Iterator[Share]:
    """Every layout of a training task, with every micro-batch size that divides a mini-batch."""
    degrees = tensor_degrees(shape, pool.per_node, work.lora(task))
    micros = MICRO_BATCHES if limits.micro_batch is None else (limits.micro_batch,)
    # Tuples are compared, because comparing pydantic models takes too long.
    allowed = {(at.pp, at.tp, at.dp, at.cp, at.ep) for at in limits.layouts.get(task, ())}
    contexts = context_degrees(shape, work.longest, {cp for _, _, _, cp, _ in allowed})
    experts = {ep for *_, ep in allowed} or {1}  # only what is asked for
    for layout in every_layout(slot.gpus, degrees, shape.layers, contexts, experts):
        if task in limits.layouts and (layout.pp, layout.tp, layout.dp, layout.cp, layout.ep) not in allowed:
            continue
        if any(count % layout.batch_shares for count in limits.batches.get(task, ())):
            continue
        # One rank shares nothing with others, so all ZeRO stages are the same.
        stages = limits.fsdp if layout.dp > 1 else (min(2, limits.fsdp[0]),)
        either = limits.offload.get(task, _EITHER)
        ways: list[Any] = list(product(stages, limits.recompute, either, (1,), (layout.cp,), (layout.ep,)))
        for micro in micros:
            if work.divides(layout.batch_shares, micro):
                yield from (Share(slot.pool, slot.first, layout.pp, layout.tp, layout.dp, micro, *way) for way in ways)


# The number of a structure's fastest combinations that are estimated, and the number that are checked to find them.
COMBINATIONS = 8
PATIENCE = 200
# The least seconds that a change costs, so that one without a cost is not infinitely good.
LEAST_SECONDS = 1e-6
# Smaller savings do not count, because sums in another order differ by as much.
LEAST_BYTES = 1024.0

Combination = tuple[Share, ...]
"""A share for each of a ranking's places."""


class Combinations:
    """Knows which combinations of one ranking's layouts fit, and makes candidates. `ranker`: finds further layouts."""

    def __init__(self, ranking: Ranking, ranker: Ranker) -> None:
        self.ranking, self._ranker, self._limits, self._costs = ranking, ranker, ranker.limits, ranker.costs
        self._filling = Filling(ranking, ranker.costs)
        self._training = [at for at, (task, _) in enumerate(ranking.places) if task in TRAINING]
        # Whether actor and critic train on the same GPUs.
        self._together = len(self._training) == 2 and not ranking.structure.dedicated

    # ------------------------------------------------------------ what is worth an estimate

    def many(self) -> list[Combination]:
        """The fastest combinations, those that fit after replacements, and those that move few weights, each once."""
        return list(dict.fromkeys([*islice(self._agreeing(), COMBINATIONS), *self._repaired(), *self._aligned()]))

    def least(self) -> Combination | None:
        """The combination that keeps least of a GPU while other tasks work, and then needs least for each task."""
        for layouts in self.alike():
            least = [min(each, key=lambda o: (not o.share.offload, o.need)) for each in layouts if each]
            if len(least) == len(layouts) and (chosen := self._agreed(least)) is not None:
                return chosen
        return None

    def _agreeing(self) -> Iterator[Combination]:
        """The fastest combinations that fit, among the first PATIENCE ones."""
        layouts = self.ranking.layouts
        for at in islice(orders(layouts), PATIENCE):
            options = [ranked[i] for ranked, i in zip(layouts, at, strict=True)]
            if self._filling.fits(options) and (chosen := self._agreed(options)) is not None:
                yield chosen

    def _repaired(self) -> Iterator[Combination]:
        """Combinations that fit after replacements. There is one for each pair of micro-batch size and tp, which actor
        and critic must have in common."""
        for layouts in self.alike():
            if (chosen := self._agreed(self._filling.repaired(layouts))) is not None:
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
                if (chosen := mine._agreed(mine._filling.repaired(layouts))) is not None:
                    yield chosen

    # ------------------------------------------------------------ what can run together

    def fits(self, chosen: Combination) -> bool:
        """Whether a combination can run and fits, as far as that is known without an estimate of everything."""
        placed = zip(self.ranking.places, self.laid_out(chosen), strict=True)
        return self.agrees(chosen) and self._filling.fits([self._costs.option(task, s) for (task, _), s in placed])

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
                    tried = [chosen[place].footprint for place in cell.places]
                    here, seconds = cell.places.index(at), chosen[at].seconds
                    for i, option in enumerate(layouts[at]):
                        tried[here] = option.footprint
                        saved = min(excess, excess - _excess(cell, tried))
                        value = saved / max(LEAST_SECONDS, option.seconds - seconds)
                        if saved > LEAST_BYTES and value > best[0]:
                            best = value, at, i
                if best[0] == 0.0:
                    return None
                chosen[best[1]] = layouts[best[1]][best[2]]
        return chosen if self.fits(chosen) else None


def _excess(cell: _Cell, footprints: Sequence[Footprint]) -> float:
    """The bytes by which a GPU is too small for the footprints of a cell's places. With 0 or less they fit. A server
    that stays awake gets the memory that is left while the others work. A server that sleeps meanwhile gets all but
    what the others keep. While a model trains, the gradients of other models stay."""
    kept = gradients = works = 0.0
    for f in footprints:
        kept += f.kept
        gradients += f.gradients
    for f in footprints:
        needed = f.works + (gradients - f.gradients if f.gradients > 0 else 0.0)
        if needed > works:
            works = needed
    most = kept + works - cell.room
    for f in footprints:
        if f.serves:
            most = max(most, kept + (works if f.awake else f.works + gradients) - cell.serving)
    return most


# The descent tries layouts that alone take up to this factor longer than the one in use.
SLACK = 1.25
# The number of combinations from which a descent starts: in all, and of one structure.
FINALISTS = 6
STARTS = 2
# The number of pairs of layouts that the descent tries for two tasks.
PAIRS = 24
# The pairs of tasks whose layouts the descent changes together.
_BESIDE: tuple[tuple[Task, Task], ...] = (
    ("actor_training", "critic_training"),
    ("generation", "actor_training"),
    ("critic", "critic_training"),
)
# The fraction of the effort after which no further structure is looked at.
LOOKING = 0.5


@dataclass(frozen=True)
class Effort:
    """The search ends after `estimates` whole iterations, or once `expired()`, asked between them, is True."""

    estimates: int = 1500
    expired: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Found:
    """A candidate with its estimate."""

    candidate: Candidate
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


@dataclass(frozen=True)
class Rejected:
    """The best candidate of a kind of placement. Either it is slower than the plan (`seconds`), or it does not fit
    (`problem`). One that does not fit may have no layouts. `need`: its need as a fraction of GPU memory."""

    candidate: Candidate
    seconds: float | None = None
    problem: str | None = None
    need: float = float("inf")

    def better(self, other: Rejected) -> bool:
        """Whether this is the better of two candidates of the same kind."""
        if self.seconds is None or other.seconds is None:
            return self.seconds is not None or (other.seconds is None and self.need < other.need)
        return self.seconds < other.seconds


@dataclass
class Result:
    """The result of a search. `best`: None if nothing fits. `estimates`: the number of estimated iterations."""

    best: Found | None = None
    rejected: list[Rejected] = field(default_factory=list)
    estimates: int = 0


def alternatives(result: Result, instead: Found) -> list[Rejected]:
    """The candidates that a result rejects if `instead` is the plan. The result's own best placement comes first, and
    no placement has the kind of `instead`."""
    assert result.best is not None
    first = Rejected(result.best.candidate, result.best.seconds)
    return [r for r in (first, *result.rejected) if r.candidate.kind != instead.candidate.kind]


class Search:
    """One search. It is deterministic if `effort.expired` is deterministic."""

    combine: type[Combinations] = Combinations

    def __init__(self, limits: Limits, costs: GPUCosts, effort: Effort) -> None:
        self.limits, self.costs, self.effort = limits, costs, effort
        self.ranker = Ranker(limits, costs)
        self.result = Result()
        self._known: dict[Candidate, Estimate] = {}
        self._finalists: list[tuple[float, int, Combinations, Found]] = []
        self._kinds: dict[tuple[Placement, str], Rejected] = {}

    def run(self) -> Result:
        """The best placement of all structures."""
        for ranking in sorted(self._ranked(), key=lambda ranking: ranking.guess):
            spent = self.result.estimates >= LOOKING * self.effort.estimates
            if self._over() or (spent and self.result.best is not None):
                break
            self._beam(self.combine(ranking, self.ranker))
        for mine, start in self._chosen():
            self._descend(mine, start)
        self._threshold()
        found = self.result.best
        chosen = None if found is None else found.candidate.kind
        others = [r for kind, r in self._kinds.items() if kind != chosen]
        self.result.rejected = sorted(others, key=lambda r: (r.seconds is None, r.seconds or 0.0, r.candidate.kind))
        return self.result

    def _once(self, mine: Combinations, chosen: Combination) -> Found:
        """Estimate a combination with the best candidate's threshold and the schedule that is likely to be fastest."""
        best, migrations = self.result.best, self.limits.migrations
        migration = best.candidate.migration if best else migrations[len(migrations) // 2]
        return self.estimated(replace(mine.candidate(chosen, mine.schedules(chosen)[-1]), migration=migration))

    def _over(self) -> bool:
        # Some effort is kept for `_threshold`, which comes last.
        kept = min(len(FINE_MIGRATIONS), self.effort.estimates // 10)
        return self.result.estimates >= self.effort.estimates - kept or self.effort.expired()

    # ------------------------------------------------------------ structures

    def structures(self) -> Iterator[Candidate]:
        """The structures that the search examines."""
        return Structures(self.costs.inventory, self.costs.work, self.limits).every()

    def _ranked(self) -> list[Ranking]:
        found = []
        for structure in self.structures():
            ranking = self.ranker.rank(structure)
            if isinstance(ranking, Ranking):
                found.append(ranking)
            else:
                self._kind(Rejected(structure, problem=ranking.problem, need=ranking.need))
            if self.effort.expired():
                break
        return found

    # ------------------------------------------------------------ combinations

    def _beam(self, mine: Combinations) -> None:
        """Estimate the structure's best combinations. The best of them become finalists."""
        found: list[tuple[float, int, Combination]] = []
        for order, chosen in enumerate(mine.many()):
            if self._over():
                break
            once = self._once(mine, chosen)
            if once.estimate.fits:
                found.append((once.seconds, order, chosen))
        least = mine.least()
        if not found and least is not None:
            found.append((0.0, 0, least))
        for _, _, chosen in sorted(found)[:STARTS]:
            if self._over():
                break
            tried = self._try(mine, chosen)
            if tried.estimate.fits:
                self._finalists.append((tried.seconds, len(self._finalists), mine, tried))

    def _try(self, mine: Combinations, chosen: Combination) -> Found:
        """Find the best schedule for a combination, and then the best migration threshold."""
        found = min((self.estimated(mine.candidate(chosen, each)) for each in mine.schedules(chosen)), key=_order)
        if found.estimate.fits:
            candidates = (replace(found.candidate, migration=m) for m in self.limits.migrations[1:])
            found = min([found, *map(self.estimated, candidates)], key=_order)
        return found

    def estimated(self, candidate: Candidate) -> Found:
        """Estimate a candidate, unless it is known already, and keep it if it is the best so far."""
        if candidate not in self._known:
            self.result.estimates += 1
            self._known[candidate] = self.costs.estimate(candidate)
        found = Found(candidate, self._known[candidate])
        problem = found.estimate.problem
        need = max(m.device_bytes / m.capacity for m in found.estimate.memory)
        self._kind(Rejected(candidate, None if problem else found.seconds, problem, need))
        if problem is None and (self.result.best is None or found.seconds < self.result.best.seconds):
            self.result.best = found
        return found

    def _kind(self, found: Rejected) -> None:
        """Keep the best candidate of each kind of placement: the fastest that fits, or the one nearest to fitting."""
        old = self._kinds.get(found.candidate.kind)
        if old is None or found.better(old):
            self._kinds[found.candidate.kind] = found

    # ------------------------------------------------------------ the descent

    def _descend(self, start_at: Combinations, current: Found) -> None:
        """Change the layout of one task or of two tasks at a time, among all that fit, while that helps."""
        wide = self.ranker.rank(start_at.ranking.structure, EVERY)
        assert isinstance(wide, Ranking)
        mine, improved = self.combine(wide, self.ranker), True
        while improved and not self._over():
            before = current
            for at in range(len(wide.layouts)):
                for option in self._within_slack(wide, current, at):
                    current = self._vary(mine, current, {at: option})
            for one, other in _BESIDE:
                for pair in self._pairs(wide, current, one, other):
                    current = self._vary(mine, current, pair)
            improved = current is not before
            if improved and not self._over():
                current = min(current, self._try(mine, _shares(current)), key=_order)

    def _chosen(self) -> list[tuple[Combinations, Found]]:
        """The best finalists, and the best of each kind of placement."""
        ordered = [(mine, found) for _, _, mine, found in sorted(self._finalists, key=lambda f: f[:2])]
        rest = {found.candidate.placement: (mine, found) for mine, found in reversed(ordered[FINALISTS:])}
        known = {found.candidate.placement for _, found in ordered[:FINALISTS]}
        return [*ordered[:FINALISTS], *(rest[kind] for kind in Placement if kind in rest and kind not in known)]

    def _threshold(self) -> None:
        """Try migration thresholds in smaller steps for the best candidate."""
        found = self.result.best
        if found is not None and self.limits.migrations == MIGRATIONS:
            for migration in FINE_MIGRATIONS:
                if self.result.estimates < self.effort.estimates and not self.effort.expired():
                    self.estimated(replace(found.candidate, migration=migration))

    def _within_slack(self, wide: Ranking, current: Found, at: int) -> list[Option]:
        """The layouts of a place that alone take not much longer than the current one."""
        used = _shares(current)[at]
        seconds = next((o.seconds for o in wide.layouts[at] if o.share == used), 0.0)
        return [o for o in wide.layouts[at] if o.seconds <= SLACK * seconds]

    def _pairs(self, wide: Ranking, current: Found, one: Task, other: Task) -> list[dict[int, Option]]:
        """Pairs of layouts that go together, the fastest first. For actor and critic, pairs can share a schedule. For
        training and serving the same weights, the layouts are equal, because then no weights move."""
        places = [at for at, (task, _) in enumerate(wide.places) if task in (one, other)]
        trained = one == "actor_training"
        divided = trained and wide.structure.dedicated
        if len(places) != 2 or (wide.places[places[0]][1] != wide.places[places[1]][1] and not divided):
            return []
        first, second = places
        both = [
            (a.seconds + b.seconds, order, {first: a, second: b})
            for order, (a, b) in enumerate(product(*(self._within_slack(wide, current, at) for at in places)))
            if divided
            or (
                a.share.tp == b.share.tp
                and (max(a.share.pp, b.share.pp) % min(a.share.pp, b.share.pp) == 0)
                and (trained or a.share.pp == b.share.pp)
            )
        ]
        found = heapq.nsmallest(PAIRS, both, key=lambda p: p[:2])
        if trained and not divided:
            # The fastest pair of each equal number of stages is tried too. Single changes lead there through slow
            # unlike pipelines.
            alike: dict[tuple[int, int], tuple[float, int, dict[int, Option]]] = {}
            for each in sorted(both, key=lambda p: p[:2]):
                mine, theirs = (option.share for option in each[2].values())
                if (mine.pp, mine.micro_batch) == (theirs.pp, theirs.micro_batch):
                    alike.setdefault((mine.pp, mine.micro_batch), each)
            known = {order for _, order, _ in found}
            found += [each for each in alike.values() if each[1] not in known]
        return [pair for _, _, pair in found]

    def _vary(self, mine: Combinations, current: Found, changes: Mapping[int, Option]) -> Found:
        """The better of `current` and `current` with the changes."""
        if self._over():
            return current
        varied = tuple(changes[at].share if at in changes else share for at, share in enumerate(_shares(current)))
        return min(current, self._once(mine, varied), key=_order) if mine.fits(varied) else current


def _shares(found: Found) -> Combination:
    """The shares of a candidate, in the order of a ranking's places, as if each began at GPU 0."""
    return tuple(
        share.at(0) if share.pipelines == 1 else replace(share.at(0), pipelines=1)
        for _, share in found.candidate.placed
    )


def _order(found: Found) -> tuple[bool, float]:
    """A sorting key: the better candidate comes first."""
    return not found.estimate.fits, found.seconds


def search_fewest_stages(limits: Limits, most: int, search: Callable[[Limits], Result]) -> tuple[Result, Limits]:
    """The result of `search` with the fewest pipeline stages of inference models with which anything fits, and the
    limits of that search. Powers of two up to `most` are tried. If nothing fits with any, the last result is returned.
    Its rejected candidates then include those with fewer stages of the same kind of placement, with the reasons.

    More stages would let more GPUs of a pod score at the same time. Only the cost model says so, and no measurement."""
    failed: dict[int, Result] = {}
    stages = 1
    while True:
        tried = replace(limits, inference_pp=min(stages, limits.inference_pp))
        result = search(tried)
        if result.best is not None or 2 * stages > min(most, limits.inference_pp):
            break
        failed[stages] = result
        stages *= 2
    best = result.best
    for count, other in failed.items():
        how = "inference models whole" if count == 1 else f"inference models on at most {count} GPUs"
        for r in other.rejected:
            if best is not None and r.problem is not None and r.candidate.kind == best.candidate.kind:
                candidate = replace(r.candidate, note=joined(r.candidate.note, how))
                result.rejected.append(Rejected(candidate, problem=r.problem))
    return result, tried
