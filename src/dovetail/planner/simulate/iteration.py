"""Simulates an iteration of a candidate event by event, and writes it as a trace in the format of real runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.planner.candidate import Candidate
from dovetail.planner.costs.gpu import PHASES, GPUCosts
from dovetail.planner.simulate.rollout import play_rollout
from dovetail.planner.simulate.training import Bar, play_training
from dovetail.planner.workload import Ints
from dovetail.protocol.files.trace import chrome_trace
from dovetail.protocol.messages import Span
from dovetail.protocol.prediction import MEASURED_NAMES
from dovetail.protocol.process.process_names import COORDINATOR


@dataclass(frozen=True)
class Simulated:
    """A simulated iteration. `phases`: seconds by name of PHASES. `bars`: what each GPU does. `migrated`: the number of
    samples that moved. `gathered`: when the tail moved to fewer servers, in seconds since the iteration began. None: it
    did not move."""

    phases: Mapping[str, float]
    bars: tuple[Bar, ...]
    migrated: int
    gathered: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def trace(self, iteration: int = 1) -> dict[str, Any]:
        """A trace for Perfetto, like traces/iteration-0001.json of a run. Each GPU is a process. The coordinator shows
        the phases."""
        spans = [
            Span(name=b.name, process=f"{b.pool}-{b.gpu}", lane=b.lane, start=b.start, end=b.end, iteration=iteration)
            for b in self.bars
        ]
        if self.gathered is not None:
            end = self.phases["swap"] + self.phases["generation"]
            told = {"migrated": self.migrated}
            overlap = Span(name="overlap", process=COORDINATOR, lane="fusion", start=self.gathered, end=end, args=told)
            spans.append(overlap)
        now = 0.0
        for name in _ORDER:
            end = now + self.phases[name]
            word = MEASURED_NAMES.get(name, name)
            spans.append(Span(name=word, process=COORDINATOR, lane="phases", start=now, end=end, iteration=iteration))
            now = end
        return chrome_trace(spans, {"iteration": iteration, "predicted": True})


_ORDER = ("swap", "generation", "inference", "training", "transfer")
assert sorted(_ORDER) == sorted(PHASES)


def simulate(candidate: Candidate, costs: GPUCosts, prompts: Ints, lengths: Ints) -> Simulated:
    """Simulates one iteration. `prompts`, `lengths`, (batch,): the tokens of each sample's prompt and response.

    Raises KeyError for a pool that the inventory lacks."""
    _, rooms = costs.memory.of(candidate)
    swapped, moved = costs.swapped_in(candidate), costs.transfer(candidate)
    rolled = play_rollout(candidate, costs, rooms, prompts, lengths)
    begun = swapped + rolled.scored
    training, trained = play_training(candidate, costs, prompts + lengths, begun)
    phases = {
        "generation": rolled.generated,
        "inference": rolled.scored - rolled.generated,
        "training": training,
        "transfer": moved,
        "swap": swapped,
    }
    gathered = None if rolled.begun is None else swapped + rolled.begun
    end = begun + training
    bars = [b._replace(start=b.start + swapped, end=b.end + swapped) for b in rolled.bars]
    bars += trained
    if moved:
        holders = (*candidate.actor_training, *candidate.generation)
        gpus = sorted({(share.pool, gpu) for share in holders for gpu in share.range})
        bars += [Bar(pool, gpu, "weights", "weights", end, end + moved) for pool, gpu in gpus]
    for share in candidate.generation:
        bars += [Bar(share.pool, gpu, "swap", "swap in", 0.0, swapped) for gpu in share.range if swapped]
    return Simulated(phases, tuple(bars), rolled.migrated, gathered)
