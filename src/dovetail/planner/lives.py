"""What samples cost on GPUs with a price, some of which come and go. Pure.

A node of a pool with a mean lifetime dies at random (exponential lives). Then the pool is a node short until the next
one comes, which is not paid for meanwhile. A new node is paid for from its start, and works `START_SECONDS` later.
Rollouts go on with the nodes that are there, so generation takes longer; the rest of an iteration does not. When a node
of trainers dies, all wait for the next one, and begin the training of the iteration anew."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.planner.inventory import Inventory, Pool

# A node's container and server, and its weights: until it works.
START_SECONDS = 120.0
# Tokens that a dead server had not sent, and prefills elsewhere.
LOST_SECONDS = 2.0
# Steps by which the capacity of a fleet is counted.
GRID = 240
HOUR = 3600.0


def present(pool: Pool) -> float:
    """The share of the time in which a node of the pool is there, and paid for."""
    return 1.0 if pool.life is None else pool.life / (pool.life + pool.absence)


def working(pool: Pool) -> float:
    """The share of the time in which a node of the pool works: from its start's end to its death."""
    if pool.life is None:
        return 1.0
    useful = pool.life * math.exp(-START_SECONDS / pool.life)
    return max(0.0, useful - LOST_SECONDS) / (pool.life + pool.absence)


def capacities(parts: Iterable[tuple[float, int, float]]) -> NDArray[np.float64]:
    """The distribution of a fleet's capacity: at index i, how likely it is to be i / GRID of the whole. `parts`: for
    each pool its share of the whole, its nodes, and how likely one of these works."""
    found: NDArray[np.float64] = np.ones(1)
    for share, nodes, chance in parts:
        mine = np.zeros(round(GRID * share) + 1)
        logs = np.log([chance, 1 - chance]) if 0 < chance < 1 else None
        for k in range(nodes + 1):
            if logs is None:
                likely = float(k == (nodes if chance >= 1 else 0))
            else:
                ways = math.lgamma(nodes + 1) - math.lgamma(k + 1) - math.lgamma(nodes - k + 1)
                likely = math.exp(ways + k * logs[0] + (nodes - k) * logs[1])
            mine[round((len(mine) - 1) * k / nodes)] += likely
        found = np.asarray(np.convolve(found, mine), np.float64)
    return found


@dataclass(frozen=True)
class Use:
    """GPUs of a pool that a placement uses, for rollouts or for trainers."""

    pool: str
    gpus: int
    trains: bool


@dataclass(frozen=True)
class PricedIteration:
    """`seconds` of an iteration, deaths and starts counted. `per_hour`: the price of its GPUs, those that are absent
    not counted; None: a price is missing. `lost`: the share of the price that deaths and starts cost."""

    seconds: float
    per_hour: float | None
    lost: float

    def per_thousand(self, batch: int) -> float | None:
        """The price of 1,000 samples."""
        return None if self.per_hour is None else self.per_hour * self.seconds / HOUR * 1000 / batch


def expected(phases: Mapping[str, float], uses: Sequence[Use], inventory: Inventory) -> PricedIteration:
    """Of iterations with these seconds by phase. A fleet changes slowly against an iteration: iterations are averaged
    over what may be there."""
    plain = seconds = sum(phases.values())
    rollouts = [use for use in uses if not use.trains]
    if any(inventory[use.pool].life is not None for use in rollouts):
        seconds = _slowed(phases, rollouts, inventory)
    for use in uses:
        pool = inventory[use.pool]
        if use.trains and pool.life is not None:
            rate, training = _nodes(use, inventory) / pool.life, phases.get("training", 0.0)
            # Work of t seconds, begun anew after each death, takes (1/rate + absence) e^(rate start) (e^(rate t) - 1).
            started = math.exp(min(rate * START_SECONDS, 50.0))
            again = (1 / rate + pool.absence) * started * math.expm1(min(rate * training, 50.0))
            seconds = (seconds - training) * (started + rate * pool.absence) + again
    prices = [(inventory[use.pool].price, use) for use in uses]
    if any(price is None for price, _ in prices):
        return PricedIteration(seconds, None, 0.0)
    paid = sum((price or 0.0) * use.gpus * present(inventory[use.pool]) for price, use in prices)
    whole = sum((price or 0.0) * use.gpus for price, use in prices)
    lost = 1 - whole * plain / (paid * seconds) if paid else 0.0
    return PricedIteration(seconds, paid, max(0.0, lost))


def _slowed(phases: Mapping[str, float], rollouts: Sequence[Use], inventory: Inventory) -> float:
    """Seconds of an iteration on average over the rollouts that may be there."""
    total = sum(use.gpus for use in rollouts)
    parts = [(use.gpus / total, _nodes(use, inventory), working(inventory[use.pool])) for use in rollouts]
    drawing = phases.get("generation", 0.0) + phases.get("inference", 0.0)
    rest, chances = sum(phases.values()) - drawing, capacities(parts)
    there = np.arange(1, len(chances)) / (len(chances) - 1)
    rate = float(chances[1:] @ (1 / (rest + drawing / there)))  # with no rollout nothing goes on
    return 1 / rate if rate else float("inf")


def _nodes(use: Use, inventory: Inventory) -> int:
    return max(1, use.gpus // inventory[use.pool].per_node)


def uses(candidate: Any, memory: Iterable[Any]) -> list[Use]:
    """Of a candidate's GPUs: each pool's, those that train apart from those that do not. `memory`: of every GPU with a
    task (`Estimate.memory`)."""
    training = [(s.pool, s.range) for s in (*candidate.actor_training, *candidate.critic_training)]
    counts: dict[tuple[str, bool], int] = {}
    for used in memory:
        for number in used.range:
            trains = any(pool == used.pool and number in numbers for pool, numbers in training)
            counts[used.pool, trains] = counts.get((used.pool, trains), 0) + 1
    return [Use(pool, gpus, trains) for (pool, trains), gpus in sorted(counts.items())]
