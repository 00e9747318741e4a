"""The families of schedules, and the schedules that a rule builds without a search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dovetail.pipelines.instance import Coupling, SearchInstance, Shape, StagePlacement, make_instance
from dovetail.pipelines.problem import ModelPipelines, ProblemError, ScheduleProblem
from dovetail.pipelines.schedule import Schedule, evaluate
from dovetail.pipelines.simulate import KINDS, B, F, Ints, W, one_f_one_b


def interleaved(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """Interleaved 1F1B. A rank runs forwards of one chunk for as many micro-batches as there are ranks, and then those
    of the next chunk.

    If the number of micro-batches is not a multiple of the ranks, the rounds are longer, as in torch."""
    p, place = instance.place(rank, m)
    chunks, count = list(instance.chunks(m)), instance.problem.models[m].micro_batches
    rounds = max(1, count // p)
    size, longer = divmod(count, rounds)
    sizes = [size + 1] * longer + [size] * (rounds - longer)
    forwards = [KINDS * c + F for each in sizes for c in chunks for _ in range(each)]
    backwards = [KINDS * c + B for each in sizes for c in reversed(chunks) for _ in range(each)]
    # The last chunk's first backward follows its first forward on the last rank, and travels one rank in two passes.
    warm_up = min(len(forwards), (len(chunks) - 1) * sizes[0] + 2 * (p - 1 - place))
    order = forwards[:warm_up]
    for forward, backward in itertools.zip_longest(forwards[warm_up:], backwards):
        order += [code for code in (forward, backward) if code is not None]
    return order


def zb_v(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """ZB-V. It has no bubbles after the warm-up if forward, input gradient and weight gradient take equal times. If
    backwards are whole, the weight gradients are left out."""
    p, place = instance.place(rank, m)
    down, up = (KINDS * c for c in instance.chunks(m))
    count = instance.problem.models[m].micro_batches
    many = max(2 * p - 1, count)  # the rule must fill the pipeline; surplus micro-batches are left out below
    order = [down + F] * (2 * (p - place) - 1) + [up + F, down + F] * place + [up + F, up + B, up + W] * (p - place)
    while order.count(up + F) < many:
        if order.count(down + F) < many:
            order.append(down + F)
        order += [down + B, down + W, up + F, up + B, up + W]
    order += [down + B, up + B] * place + [down + B, down + W] * (p - place)
    order += [up + W] * (many - order.count(up + W)) + [down + W] * (many - order.count(down + W))
    done = dict.fromkeys(range(down, up + KINDS), 0) | dict.fromkeys(range(up, up + KINDS), 0)
    kept = []
    for code in order:
        done[code] += 1
        if done[code] <= count and code % KINDS < instance.kinds:
            kept.append(code)
    return kept


def v_half(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """V-Half: half of the activation memory of 1F1B."""
    return _repeated(instance, rank, m, (2, 1))


def v_min(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """V-Min: a third of the activation memory of 1F1B."""
    return _repeated(instance, rank, m, (1, 1))


def one_by_one(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """One micro-batch after the other, with any number of chunks. No other schedule needs less memory. Under a limit of
    memory as many at once as fit."""
    problem, chunks = instance.problem, list(instance.chunks(m))
    count, limit = problem.models[m].micro_batches, problem.memory_limit
    together = 1 if limit is None else max(1, int(limit / (problem.least_memory_of(len(chunks)) or limit)))
    order: list[int] = []
    for begun in range(0, count, together):
        turn = [KINDS * c + F for c in chunks]
        turn += [KINDS * c + kind for kind in range(B, instance.kinds) for c in chunks[::-1]]
        order += [code for code in turn for _ in range(min(together, count - begun))]
    return order


PERIOD = 6
"""Time units between two micro-batches: a rank runs three kinds of passes in two chunks, one unit each."""


def _repeated(instance: SearchInstance, rank: int, m: int, distances: tuple[int, int]) -> list[int]:
    p, place = instance.place(rank, m)
    chunks, count = list(instance.chunks(m)), instance.problem.models[m].micro_batches
    block = _building_block(p, distances)[place]
    timed = [(start + PERIOD * q, KINDS * chunks[c] + kind) for (c, kind), start in block.items() for q in range(count)]
    return [code for _, code in sorted(timed)]


@lru_cache(maxsize=64)
def _building_block(p: int, distances: tuple[int, int]) -> list[dict[tuple[int, int], int]]:
    """The starts of the six passes of one micro-batch on each rank, by (chunk, kind), in units of time.

    `distances`: the time from one rank to the next, in the forward of the first chunk and in that of the second. The
    input gradient of the second chunk takes the first of these times, and that of the first chunk takes the second. The
    three turns are delayed as little as possible. Micro-batches with `PERIOD` units of time between them must never
    meet."""
    slow, fast = distances
    for delays in sorted(itertools.product(range(PERIOD), repeat=3), key=sum):
        block = []
        for x in range(p):
            turn = slow * (p - 1) + 1 + delays[0]
            back = turn + fast * (p - 1) + 1 + delays[1]
            last = back + slow * (p - 1) + 1 + delays[2]
            starts = {
                (0, F): slow * x,
                (1, F): turn + fast * (p - 1 - x),
                (1, B): back + slow * x,
                (0, B): last + fast * (p - 1 - x),
            }
            if len({start % PERIOD for start in starts.values()}) < len(starts):
                break
            for c in (1, 0):
                taken = {start % PERIOD for start in starts.values()}
                starts[c, W] = next(t for t in itertools.count(starts[c, B] + 1) if t % PERIOD not in taken)
            block.append(starts)
        else:
            return block
    raise AssertionError(f"no building block for {p} ranks")


@dataclass(frozen=True)
class Family:
    """A family of schedules.

    `reverse`: the critic's pipelines run in the opposite direction to the actor's. `chunks`: the number of stages of a
    model on each of its ranks; `shape` says how they are laid out. `split`: a backward is split into input gradient and
    weight gradient. `fixed`: a rule builds the schedule; other families are searched. `capped`: the search starts from
    a rule's schedule, and uses no more memory than this schedule. `published`: the published name of the family, or the
    schedule that it is based on."""

    name: str
    description: str
    coupling: Coupling
    reverse: bool = False
    split: bool = False
    fixed: bool = False
    chunks: int = 1
    shape: Shape = Shape.ZIGZAG
    capped: bool = False
    published: str = ""

    @property
    def placement(self) -> StagePlacement:
        return StagePlacement(self.reverse, self.chunks, self.shape)


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "serial",
            "one model after the other",
            Coupling.SERIAL,
            fixed=True,
            published="1F1B twice (PipeDream-Flush; torch's Schedule1F1B)",
        ),
        Family(
            "zero-bubble",
            "backward split, one model after the other",
            Coupling.SERIAL,
            split=True,
            published="ZB-H1 twice (ZB1P)",
        ),
        Family(
            "stitched",
            "time-sharing, same direction",
            Coupling.MINI_BATCH,
            fixed=True,
            published="time-sharing (PUZZLE)",
        ),
        Family("stitched-rolled", "stitched over mini-batch borders", Coupling.ROLLED, fixed=True),
        Family("shared", "same direction, searched", Coupling.MINI_BATCH),
        Family("shared-rolled", "same direction, searched, rolled", Coupling.ROLLED),
        Family("fused", "bidirectional", Coupling.MINI_BATCH, reverse=True, published="RLHFuse"),
        Family("fused-rolled", "bidirectional, rolled", Coupling.ROLLED, reverse=True),
        Family("fused-split", "bidirectional, backward split", Coupling.MINI_BATCH, reverse=True, split=True),
        Family("fused-split-rolled", "bidirectional, split, rolled", Coupling.ROLLED, reverse=True, split=True),
    )
}


def interleaved_family(chunks: int, models: int = 2) -> Family:
    """Interleaved 1F1B with so many chunks on each rank: `interleaved` for 2, `interleaved-4` for 4. `models`: how many
    the problem has."""
    return Family(
        "interleaved" if chunks == 2 else f"interleaved-{chunks}",
        f"{chunks} chunks in a loop" + (", no barrier" if models > 1 else ""),
        Coupling.MINI_BATCH,
        fixed=True,
        chunks=chunks,
        shape=Shape.LOOP,
        published=f"interleaved 1F1B{' twice' if models > 1 else ''} (Megatron-LM; torch's ScheduleInterleaved1F1B)"
        + ("" if chunks == 2 else f", {chunks} chunks"),
    )


CHUNKED = {
    family.name: family
    for family in (
        *(interleaved_family(chunks) for chunks in (2, 4)),
        Family(
            "zb-v",
            "a V of each model, no barrier",
            Coupling.MINI_BATCH,
            split=True,
            fixed=True,
            chunks=2,
            published="ZB-V twice (torch's ScheduleZBVZeroBubble)",
        ),
        Family(
            "v-half",
            "at most V-Half's memory, same direction",
            Coupling.MINI_BATCH,
            split=True,
            chunks=2,
            capped=True,
            published="V-Half, shortened by search",
        ),
        Family(
            "v-min",
            "at most V-Min's memory, same direction",
            Coupling.MINI_BATCH,
            split=True,
            chunks=2,
            capped=True,
            published="V-Min, shortened by search",
        ),
        Family("fused-v", "a V of each model, bidirectional", Coupling.MINI_BATCH, reverse=True, split=True, chunks=2),
        Family("fused-v-rolled", "the same, rolled", Coupling.ROLLED, reverse=True, split=True, chunks=2),
        Family("fused-v-whole", "fused-v, backwards not split", Coupling.MINI_BATCH, reverse=True, chunks=2),
        Family("fused-w", "four chunks, bidirectional", Coupling.MINI_BATCH, reverse=True, split=True, chunks=4),
    )
}
"""Families that lay several stages of a model on each rank (Qi et al., arXiv 2401.10241 and 2405.15362; the fused ones
are ours)."""
ALONE = {family.name: family for family in (interleaved_family(chunks, 1) for chunks in (2, 4))} | {
    name: replace(family, description=description, published=published, coupling=Coupling.MINI_BATCH)
    for name, family, description, published in (
        (
            "serial",
            FAMILIES["serial"],
            "one forward, one backward",
            "1F1B (PipeDream-Flush; torch's Schedule1F1B)",
        ),
        ("zero-bubble", FAMILIES["zero-bubble"], "1F1B, backward split", "ZB-H1 (ZB1P), shortened by search"),
        ("zb-v", CHUNKED["zb-v"], "a V, backward split", "ZB-V (torch's ScheduleZBVZeroBubble)"),
        ("v-half", CHUNKED["v-half"], "at most V-Half's memory", "V-Half, shortened by search"),
        ("v-min", CHUNKED["v-min"], "at most V-Min's memory", "V-Min, shortened by search"),
        ("v-whole", replace(CHUNKED["fused-v-whole"], name="v-whole", reverse=False), "a V, backward not split", ""),
    )
}
"""The families of a problem of one model."""
DEDICATED = Family(
    "dedicated",
    "each model on ranks of its own",
    Coupling.ROLLED,
    fixed=True,
    published="dedicated devices (PUZZLE), interleaving (APP)",
)
"""The only family in which the models do not share ranks. It is not part of `FAMILIES`."""


def family_of(name: str, models: int = 2) -> Family:
    """The family with this name, for problems of so many models. Raises KeyError for other names."""
    if models == 1:
        return ALONE[name]
    return DEDICATED if name == DEDICATED.name else {**FAMILIES, **CHUNKED}[name]


def family_names(problem: ScheduleProblem, chunked: bool = False) -> list[str]:
    """The families that make sense for the problem. Rolled ones need a border between mini-batches. `chunked`: include
    those that lay several stages on a rank."""
    if len(problem.models) == 1:
        return [name for name, family in ALONE.items() if chunked or family.chunks == 1]
    names = [*FAMILIES, *(CHUNKED if chunked else ())]
    return [n for n in names if problem.mini_batches > 1 or not n.endswith("-rolled")]


def family_instance(problem: ScheduleProblem, family: Family) -> SearchInstance:
    return make_instance(problem, family.placement, split=family.split, coupling=family.coupling)


def starts(instance: SearchInstance) -> Iterator[Ints]:
    """Orders of an instance's passes that a rule builds. A search may start from them. The fastest come first."""
    chunks = instance.placement.chunks
    names = ["serial"] if chunks == 1 else ["one by one"]
    if chunks == 2 and instance.split:
        names = ["zb-v", "v-half", "v-min", *names]
    elif chunks == 2 and len(instance.problem.models) == 1:
        names = ["zb-v", *names]
    for name in names:
        yield fixed_orders(instance, Family(name, "", instance.coupling))


def fixed_schedule(problem: ScheduleProblem, family: Family) -> Schedule:
    """The schedule of a family that is built by rule. Raises ProblemError for other families, and if the schedule
    exceeds the problem's memory limit."""
    if family is DEDICATED:
        return dedicated(problem)
    instance = family_instance(problem, family)
    found = evaluate(instance, fixed_orders(instance, family), family.name)
    limit = problem.memory_limit
    if not found.fits(limit):
        raise ProblemError(
            f"the family {family.name} needs {found.peak:g} of activation memory, the limit is {limit:g}; "
            "raise the limit or choose a searched family"
        )
    return found


_Rule = Callable[[SearchInstance, int, int], list[int]]


def fixed_orders(instance: SearchInstance, family: Family) -> Ints:
    """The orders (N, length) of a family that is built by rule and shares all ranks. Raises ProblemError for other
    families."""
    mini_batches = instance.problem.mini_batches
    rows: list[list[int]] = []
    for rank in range(instance.ranks):
        if family.name == "stitched":
            rows.append(_stitched(instance, rank, 1) * mini_batches)
        elif family.name == "stitched-rolled":
            rows.append(_stitched(instance, rank, mini_batches))
        elif (rule := interleaved if family.shape is Shape.LOOP else _RULES.get(family.name)) is not None:
            passes = [code for m in range(len(instance.problem.models)) for code in rule(instance, rank, m)]
            rows.append(passes * mini_batches)
        else:
            raise ProblemError(f"schedules of the family {family.name} are searched for, not built by rule")
    return np.array(rows, dtype=np.int64)


def _one_f_one_b(instance: SearchInstance, rank: int, m: int) -> list[int]:
    """1F1B of one mini-batch of one model on one rank."""
    (ranks, place), chunk = instance.place(rank, m), instance.chunks(m).start
    count = instance.problem.models[m].micro_batches
    return [KINDS * chunk + kind for kind in one_f_one_b(ranks, place, count, range(B, instance.kinds))]


def _stitched(instance: SearchInstance, rank: int, mini_batches: int) -> list[int]:
    """One 1F1B over the micro-batches of actor and critic in turn (PUZZLE section 4.2, figure 5b).

    When one model has no forwards left, the next model's forwards fill its cool-down. If the models have different
    numbers of stages, a rank keeps as many micro-batches in flight as the model of the next forward needs."""
    group = instance.group
    turns = [m for _ in range(mini_batches) for m in (0, 1) for _ in range(int(group[m]))]
    room = [int(instance.stages[m] - instance.position[m, rank]) for m in (0, 1)]
    order: list[int] = []
    forwards, backwards = [0, 0], [0, 0]
    for m in turns:
        while sum(forwards) < len(turns):
            due = turns[sum(forwards)]
            # A model's next mini-batch waits for its optimizer step, and so for its own backwards.
            stepped = backwards[due] >= forwards[due] // group[due] * group[due]
            if sum(forwards) - sum(backwards) >= max(1, room[due]) or not stepped:
                break
            order.append(KINDS * due + F)
            forwards[due] += 1
        order.append(KINDS * m + B)
        backwards[m] += 1
    return order


_RULES: dict[str, _Rule] = {
    "serial": _one_f_one_b,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "one by one": one_by_one,
}


def dedicated(problem: ScheduleProblem) -> Schedule:
    """The fastest schedule with each model on ranks of its own, for a problem whose models share all ranks. Both models
    train at the same time (PUZZLE section 3: single-model-dedicated-device; APP: interleaving).

    Each model has one pipeline. Its layers are divided evenly, and each micro-batch takes the mean time. Neither model
    waits for the other, so 1F1B is optimal for whole backwards, and only the division of the ranks is searched. Raises
    ProblemError if no division fits the memory limit."""
    found = []
    for actor in range(1, problem.ranks):
        try:
            found.append(dedicated_schedule(_divided(problem, actor)))
        except ProblemError:
            continue
    if not found:
        raise ProblemError(
            f"actor and critic do not fit on ranks of their own: {problem.ranks} ranks"
            + ("" if problem.memory_limit is None else f", each with {problem.memory_limit:g} for activations")
        )
    return min(found, key=lambda s: (round(s.makespan, 9), s.peak))


def dedicated_schedule(problem: ScheduleProblem) -> Schedule:
    """1F1B of both models of a problem in which each model has ranks of its own. Raises ProblemError if it exceeds the
    memory limit."""
    instance = family_instance(problem, DEDICATED)
    rows = [
        _one_f_one_b(instance, rank, index) * problem.mini_batches
        for index, m in enumerate(problem.models)
        for rank in m.ranks
    ]
    orders = np.full((problem.ranks, max(map(len, rows))), -1, dtype=np.int64)
    for rank, row in enumerate(rows):
        orders[rank, : len(row)] = row
    found = evaluate(instance, orders, DEDICATED.name)
    if not found.fits(problem.memory_limit):
        raise ProblemError(
            f"with ranks of their own the models need {found.peak:g} of activation memory, the limit is "
            f"{problem.memory_limit:g}"
        )
    return found


def _divided(problem: ScheduleProblem, actor: int) -> ScheduleProblem:
    """The problem with the first `actor` ranks for the actor alone and the others for the critic."""
    models = []
    for index, (first, ranks) in enumerate(((0, actor), (actor, problem.ranks - actor))):
        m = problem.models[index]
        count = m.micro_batches * m.pipelines * problem.mini_batches
        forward, backward, activation = (
            float(problem.array(index, field).sum()) / count / ranks for field in ("forward", "backward", "activation")
        )
        models.append(
            ModelPipelines(
                m.name,
                ranks,
                m.micro_batches * m.pipelines,
                forward,
                backward,
                activation,
                optimizer_step=m.optimizer_step,
                first=first,
            )
        )
    return replace(problem, models=(models[0], models[1]), communication=float(problem.latencies.max()))
