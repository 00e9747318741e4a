"""The families of schedules, and the ones that need no search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.pipelines.instance import KINDS, B, Coupling, F, Instance, Ints, make_instance
from dovetail.pipelines.problem import Problem, ProblemError


@dataclass(frozen=True)
class Family:
    """`reverse`: the critic runs against the actor. `split`: backward as input and weight gradient. `fixed`: built by
    rule; else searched for."""

    name: str
    description: str
    coupling: Coupling
    reverse: bool = False
    split: bool = False
    fixed: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("serial", "1F1B, one model after the other", Coupling.SERIAL, fixed=True),
        Family("overlapped", "1F1B, reversed critic, no barrier", Coupling.MINI_BATCH, reverse=True, fixed=True),
        Family("zero-bubble", "ZB1P, one model after the other", Coupling.SERIAL, split=True),
        Family("stitched", "time-sharing, same direction (PUZZLE)", Coupling.MINI_BATCH, fixed=True),
        Family("stitched-rolled", "stitched over mini-batch borders", Coupling.ROLLED, fixed=True),
        Family("shared", "same direction, searched", Coupling.MINI_BATCH),
        Family("shared-rolled", "same direction, searched, rolled", Coupling.ROLLED),
        Family("fused", "bidirectional (RLHFuse)", Coupling.MINI_BATCH, reverse=True),
        Family("fused-rolled", "bidirectional, rolled", Coupling.ROLLED, reverse=True),
        Family("fused-split", "bidirectional, backward split", Coupling.MINI_BATCH, reverse=True, split=True),
        Family("fused-split-rolled", "bidirectional, split, rolled", Coupling.ROLLED, reverse=True, split=True),
    )
}
DEDICATED = Family("dedicated", "each model on ranks of its own (PUZZLE)", Coupling.ROLLED, fixed=True)
"""Beside `FAMILIES`, in which both models share all ranks."""


def family_of(name: str) -> Family:
    return DEDICATED if name == DEDICATED.name else FAMILIES[name]


def family_names(problem: Problem) -> list[str]:
    """The families that make sense for the problem: rolled ones need a border to roll over."""
    return [n for n in FAMILIES if problem.mini_batches > 1 or not n.endswith("-rolled")]


def family_instance(problem: Problem, family: Family) -> Instance:
    return make_instance(problem, reverse=family.reverse, split=family.split, coupling=family.coupling)


def fixed_words(instance: Instance, family: Family) -> Ints:
    """The words (N, length) of a family that is built by rule."""
    orders: list[list[list[int]]] = []
    for rank in range(instance.ranks):
        if family.name in ("serial", "overlapped"):
            parts = [one_f_one_b(instance, rank, m) for _ in range(instance.problem.mini_batches) for m in (0, 1)]
            orders.append(parts)
        elif family.name == "stitched":
            orders.append([_stitched(instance, rank, 1)] * instance.problem.mini_batches)
        elif family.name == "stitched-rolled":
            orders.append([_stitched(instance, rank, instance.problem.mini_batches)])
        else:
            raise ProblemError(f"schedules of the family {family.name} are searched for, not built by rule")
    return np.array([[code for part in parts for code in part] for parts in orders], dtype=np.int64)


def one_f_one_b(instance: Instance, rank: int, m: int) -> list[int]:
    """1F1B of one mini-batch of one model on one rank."""
    count = int(instance.group[m])
    ahead = min(int(instance.stages[m] - instance.position[m, rank]), count)
    f, b = [KINDS * m + F], [KINDS * m + kind for kind in range(B, instance.kinds)]
    return f * ahead + (b + f) * (count - ahead) + b * ahead


def _stitched(instance: Instance, rank: int, mini_batches: int) -> list[int]:
    """One 1F1B over the micro-batches of actor and critic in turn: where one model's forwards end, the next model's
    fill its cool-down (PUZZLE section 4.2, figure 5b). With stages of unequal number the rank keeps as many in
    flight as the model whose forwards are due needs."""
    group = instance.group
    order = [m for _ in range(mini_batches) for m in (0, 1) for _ in range(int(group[m]))]
    room = [int(instance.stages[m] - instance.position[m, rank]) for m in (0, 1)]
    word: list[int] = []
    forwards, backwards = [0, 0], [0, 0]
    for m in order:
        while sum(forwards) < len(order):
            due = order[sum(forwards)]
            # A model's next mini-batch waits for its optimizer step, so for its own backwards.
            stepped = backwards[due] >= forwards[due] // group[due] * group[due]
            if sum(forwards) - sum(backwards) >= max(1, room[due]) or not stepped:
                break
            word.append(KINDS * due + F)
            forwards[due] += 1
        word.append(KINDS * m + B)
        backwards[m] += 1
    return word
