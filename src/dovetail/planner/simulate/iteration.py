"""Simulates an iteration of a candidate event by event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.fusion.lengths import Ints
from dovetail.planner.candidate import Candidate
from dovetail.planner.costs.gpu import GPUCosts
from dovetail.planner.simulate.rollout import play_rollout
from dovetail.planner.simulate.training import Bar, play_training


@dataclass(frozen=True)
class Simulated:
    """A simulated iteration. `phases`: seconds by name, as in `Estimate.phases`. `bars`: what each GPU does.
    `migrated`: the number of samples that moved when the tail gathered."""

    phases: Mapping[str, float]
    bars: tuple[Bar, ...]
    migrated: int

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def simulate(candidate: Candidate, costs: GPUCosts, prompts: Ints, lengths: Ints) -> Simulated:
    """Simulates one iteration. `prompts`, `lengths`, (batch,): the tokens of each sample's prompt and response.

    Raises KeyError for a pool that the inventory lacks."""
    swapped, moved = costs.swapped_in(candidate), costs.transfer(candidate)
    rolled = play_rollout(candidate, costs, prompts, lengths)
    begun = swapped + rolled.scored
    training, trained = play_training(candidate, costs, prompts + lengths, begun)
    phases = {
        "generation": rolled.generated,
        "inference": rolled.scored - rolled.generated,
        "training": training,
        "transfer": moved,
        "swap": swapped,
    }
    end = begun + training
    bars = [b._replace(start=b.start + swapped, end=b.end + swapped) for b in rolled.bars]
    bars += trained
    if moved:
        holders = (*candidate.actor_training, *candidate.generation)
        gpus = sorted({(share.pool, gpu) for share in holders for gpu in share.range})
        bars += [Bar(pool, gpu, "weights", "weights", end, end + moved) for pool, gpu in gpus]
    for share in candidate.generation:
        bars += [Bar(share.pool, gpu, "swap", "swap in", 0.0, swapped) for gpu in share.range if swapped]
    return Simulated(phases, tuple(bars), rolled.migrated)
