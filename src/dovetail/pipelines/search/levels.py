"""Lists the levels of a search. Cheap methods come first, and then more work for what they did not find."""

from __future__ import annotations

from typing import NamedTuple


class Level(NamedTuple):
    """What one level tries. `part`: the fraction of a round's work. `rules`, `justifying`, `annealing`: the numbers of
    rounds. `work`: the limit of each of `runs` runs of CP-SAT, in its deterministic seconds. `thin`: the number of
    tries without the larger model's steady state. `near`: such a try anneals only if its best schedule is within this
    factor of the target."""

    part: float = 1.0
    rules: int = 0
    justifying: int = 0
    annealing: int = 0
    work: float = 0.0
    runs: int = 0
    thin: int = 0
    near: float = 1.0


LATENCY = (
    Level(1 / 16, rules=1),
    Level(1 / 4, rules=1),
    Level(1 / 2, thin=1, work=0.3, runs=2),
    Level(rules=1),
    Level(thin=2),
    Level(rules=1, annealing=6, work=2.5, runs=4),
)
SPLIT_LATENCY = (  # with three kinds of passes, rules and justification find more than thinned problems
    Level(1 / 16, rules=1),
    *[Level(1 / 8, rules=1, justifying=2)] * 4,  # from new rules each time
    Level(1 / 2, rules=1, justifying=4),
    Level(1 / 4, annealing=1),
    Level(rules=1),
    Level(1 / 4, annealing=2),
    Level(1 / 2, thin=1, work=0.3, runs=2),
    Level(rules=2),
    Level(thin=2),
    Level(rules=1, annealing=6, work=2.5, runs=4),
)
MEMORY = (
    Level(1 / 16, rules=1),
    Level(1 / 2, thin=2),
    Level(1 / 2, thin=4),
    Level(work=0.7, runs=4),
    Level(1 / 4, rules=1),
    Level(1 / 2, thin=8),
    Level(work=6.0, runs=2),
    Level(rules=1),
    Level(rules=1, annealing=3),
    Level(1 / 2, thin=16),
    Level(rules=2, annealing=5),
    Level(work=5.0, runs=8),
)
THINNED = (
    Level(1 / 16, rules=1),
    Level(1 / 2, rules=1),
    Level(1 / 4, annealing=2, near=1.015),
    Level(rules=1),
)
SPARES = (2, 1, 2, 3)
"""The micro-batches that the larger model keeps beyond its warm-up, in quarters of its stages. They are tried in
turn."""
POLISH = 1.01
"""A repeated steady state that ends within this factor of the target is annealed."""
CLOSING = Level(work=2.5, runs=4)
NEAR = 1.05
"""CP-SAT looks for a schedule at the bound only if the best one is within this factor of it."""
DISPATCH_ROUNDS = 1000
"""The rounds of dispatch rules with `SearchEffort.scale` 1, if time does not end them before."""
