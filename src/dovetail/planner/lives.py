"""Computes what samples cost on GPUs with a price. Some of these GPUs are on spot nodes. All functions are pure.

A node of a pool with a mean lifetime dies at random, and its lifetime has an exponential distribution. Then the pool
lacks a node until the next one comes. The missing node costs nothing. A new node is paid for from its start, and works
`START_SECONDS` later. Rollouts go on with the nodes that are left, so only generation and inference take longer. When a
node of the trainers dies, all trainers wait for the next one, and begin the training of the iteration again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.gpus.inventory import Inventory, Pool
from dovetail.planner.candidate import Candidate
from dovetail.planner.memory import GPUMemory

# The time until a new node works: it starts its container and its server, and loads the weights.
START_SECONDS = 120.0
# The time that a dead server costs: its unsent tokens are generated again, and its samples are prefilled elsewhere.
LOST_SECONDS = 2.0
# The number of equal steps in which the capacity of a fleet is counted.
GRID = 240
HOUR = 3600.0


def present(pool: Pool) -> float:
    """The fraction of the time in which a node of the pool exists and is paid for."""
    return 1.0 if pool.life is None else pool.life / (pool.life + pool.absence)


def working(pool: Pool) -> float:
    """The fraction of the time in which a node of the pool works: from the end of its start to its death.

    A lifetime of mean L is longer than the start s with probability exp(-s / L), and then lasts L more on average."""
    if pool.life is None:
        return 1.0
    useful = pool.life * math.exp(-START_SECONDS / pool.life)
    return max(0.0, useful - LOST_SECONDS) / (pool.life + pool.absence)


def capacities(parts: Iterable[tuple[float, int, float]]) -> list[float]:
    """The distribution of a fleet's capacity. Entry i of about GRID + 1 is the probability that i of all steps work.
    The numbers of working nodes are binomial, and the pools are independent.

    `parts`: for each pool its fraction of the fleet, its number of nodes, and the probability that a node works."""
    found = [1.0]
    for share, nodes, chance in parts:
        steps = round(GRID * share)
        both = [0.0] * (len(found) + steps)
        logs = (math.log(chance), math.log(1 - chance)) if 0 < chance < 1 else None
        for k in range(nodes + 1):
            if logs is None:
                likely = float(k == (nodes if chance >= 1 else 0))
            else:
                ways = math.lgamma(nodes + 1) - math.lgamma(k + 1) - math.lgamma(nodes - k + 1)
                likely = math.exp(ways + k * logs[0] + (nodes - k) * logs[1])
            for at, other in enumerate(found, round(steps * k / nodes)):
                both[at] += other * likely
        found = both
    return found


@dataclass(frozen=True)
class Use:
    """The number of GPUs of a pool that a placement uses. `trains`: trainers use them. Otherwise rollouts do."""

    pool: str
    gpus: int
    trains: bool


@dataclass(frozen=True)
class PricedIteration:
    """`seconds`: the mean duration of an iteration, with deaths and starts of nodes. `per_hour`: the price of its GPUs
    for an hour. Absent GPUs cost nothing. It is None if a price is missing. `lost`: the fraction of the price that
    deaths and starts cost."""

    seconds: float
    per_hour: float | None
    lost: float

    def per_thousand(self, batch: int) -> float | None:
        """The price of 1,000 samples. `batch`: the samples of an iteration. None if a price is missing."""
        return None if self.per_hour is None else self.per_hour * self.seconds / HOUR * 1000 / batch


def expected(phases: Mapping[str, float], uses: Sequence[Use], inventory: Inventory) -> PricedIteration:
    """The mean duration and the price of an iteration whose phases take these seconds while all nodes work.

    A fleet changes slowly compared with an iteration. So the rate of iterations is averaged over the fleet's states."""
    plain = seconds = sum(phases.values())
    rollouts = [use for use in uses if not use.trains]
    if any(inventory[use.pool].life is not None for use in rollouts):
        seconds = _slowed(phases, rollouts, inventory)
    for use in uses:
        pool = inventory[use.pool]
        if use.trains and pool.life is not None:
            rate, training = _nodes(use, inventory) / pool.life, phases.get("training", 0.0)
            # Work of t seconds that begins again after each death takes
            # (1 / rate + absence) e^(rate start) (e^(rate t) - 1) seconds on average.
            started = math.exp(min(rate * START_SECONDS, 50.0))
            repeated = (1 / rate + pool.absence) * started * math.expm1(min(rate * training, 50.0))
            seconds = (seconds - training) * (started + rate * pool.absence) + repeated
    prices = [(inventory[use.pool].price, use) for use in uses]
    if any(price is None for price, _ in prices):
        return PricedIteration(seconds, None, 0.0)
    paid = sum((price or 0.0) * use.gpus * present(inventory[use.pool]) for price, use in prices)
    whole = sum((price or 0.0) * use.gpus for price, use in prices)
    lost = 1 - whole * plain / (paid * seconds) if paid else 0.0
    return PricedIteration(seconds, paid, max(0.0, lost))


def _slowed(phases: Mapping[str, float], rollouts: Sequence[Use], inventory: Inventory) -> float:
    """The mean seconds of an iteration, over the numbers of rollouts that may be there."""
    total = sum(use.gpus for use in rollouts)
    parts = [(use.gpus / total, _nodes(use, inventory), working(inventory[use.pool])) for use in rollouts]
    drawing = phases.get("generation", 0.0) + phases.get("inference", 0.0)
    rest, chances = sum(phases.values()) - drawing, capacities(parts)
    whole = len(chances) - 1  # without any rollout the rate is 0
    rate = math.fsum(chances[there] / (rest + drawing * whole / there) for there in range(1, whole + 1))
    return 1 / rate if rate else float("inf")


def _nodes(use: Use, inventory: Inventory) -> int:
    return max(1, use.gpus // inventory[use.pool].per_node)


def uses(candidate: Candidate, memory: Iterable[GPUMemory]) -> list[Use]:
    """Counts the GPUs that a candidate uses, by pool, and by whether they train. `memory`: the memory of every GPU that
    has a task (`Estimate.memory`)."""
    training = [(s.pool, s.range) for s in candidate.trained]
    counts: dict[tuple[str, bool], int] = {}
    for used in memory:
        # The GPUs of one entry have the same tasks.
        trains = any(pool == used.pool and used.range.start in numbers for pool, numbers in training)
        counts[used.pool, trains] = counts.get((used.pool, trains), 0) + len(used.range)
    return [Use(pool, gpus, trains) for (pool, trains), gpus in sorted(counts.items())]
