"""The order in which a search tries things: cheap ones first, and what they miss with harder work."""

from __future__ import annotations

from typing import NamedTuple


class Rung(NamedTuple):
    """What is tried before the next rung, which is harder work."""

    part: float = 1.0  # of a round's work
    rules: int = 0  # rounds
    justifying: int = 0  # rounds
    annealing: int = 0  # rounds
    work: float = 0.0  # CP-SAT's deterministic seconds, each run
    runs: int = 0
    thin: int = 0  # tries with fewer micro-batches of the larger model
    near: float = 1.0  # anneal where the best is this near to the target


LATENCY = (
    Rung(1 / 16, rules=1),
    Rung(1 / 4, rules=1),
    Rung(1 / 2, thin=1, work=0.3, runs=2),
    Rung(rules=1),
    Rung(thin=2),
    Rung(rules=1, annealing=6, work=2.5, runs=4),
)
SPLIT_LATENCY = (  # more kinds of passes: rules and their justification find more than thinned problems
    Rung(1 / 16, rules=1),
    *[Rung(1 / 8, rules=1, justifying=2)] * 4,  # from fresh rules each time
    Rung(1 / 2, rules=1, justifying=4),
    Rung(1 / 4, annealing=1),
    Rung(rules=1),
    Rung(1 / 4, annealing=2),
    Rung(1 / 2, thin=1, work=0.3, runs=2),
    Rung(rules=2),
    Rung(thin=2),
    Rung(rules=1, annealing=6, work=2.5, runs=4),
)
MEMORY = (
    Rung(1 / 16, rules=1),
    Rung(1 / 2, thin=2),
    Rung(1 / 2, thin=4),
    Rung(work=0.7, runs=4),
    Rung(1 / 4, rules=1),
    Rung(1 / 2, thin=8),
    Rung(work=6.0, runs=2),
    Rung(rules=1),
    Rung(rules=1, annealing=3),
    Rung(1 / 2, thin=16),
    Rung(rules=2, annealing=5),
    Rung(work=5.0, runs=8),
)
THINNED = (
    Rung(1 / 16, rules=1),
    Rung(1 / 2, rules=1),
    Rung(1 / 4, annealing=2, near=1.015),
    Rung(rules=1),
)
SPARES = (2, 1, 2, 3)  # quarters of its pipeline that the larger model keeps beside what fills it, in turn
POLISH = 1.01  # of the target: a repeated steady part that ends so late is annealed
CLOSING = Rung(work=2.5, runs=4)
NEAR = 1.05  # of the bound: farther away it is not what CP-SAT should be asked for first
