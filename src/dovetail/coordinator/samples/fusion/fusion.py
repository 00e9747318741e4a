"""Decides when an iteration's tail is gathered, and which scorers may work meanwhile. It uses the planner's simulation.

A job has one `Fusion`. An iteration has one `StageFusion`. The only I/O is the store's key `ppo/fusion`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from dovetail.coordinator.samples.fusion.measurements import Measurements
from dovetail.coordinator.samples.fusion.threshold import Decision, ThresholdController
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.migrations import Migration
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Instance
from dovetail.fusion.migration import plan_migration
from dovetail.fusion.profile import StageProfile
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import rollout_of

STORED = "ppo/fusion"
# These values replace what a run has not measured yet. They assume that a decode step takes almost as long with dozens
# of samples as with one. Only ratios matter for the first choice.
ASSUMED = StageProfile(
    decode=((1, 0.010), (64, 0.012)), prefill_seconds_per_token=1e-4, inference_seconds_per_token=3e-4
)


@dataclass
class StageFusion:
    """The fusion of one iteration. `decision` is None if fusion is off, or while the decision is still being computed.
    Until then `provisional` and `roomy_before` are used.

    The tail was gathered on the rollouts in `destinations`. `freed` has the other rollouts, and `remaining` says how
    many samples were left then. `generated` says whether all samples are generated."""

    profiles: dict[str, StageProfile]
    kv_per_sample: int
    decision: Decision | None = None
    provisional: int | None = None
    roomy_before: bool = False
    destinations: tuple[str, ...] = ()
    freed: tuple[str, ...] = ()
    remaining: int | None = None
    moves: int = 0
    generated: bool = False

    @property
    def threshold(self) -> int | None:
        """The number of unfinished samples at which the tail is gathered. If it is 0, the tail is never gathered. If it
        is None, inference waits until generation has ended."""
        return self.provisional if self.decision is None else self.decision.threshold

    @property
    def roomy(self) -> bool:
        """Whether the destinations take as many samples as they have room for. `Decision.roomy` says when."""
        return self.roomy_before if self.decision is None else self.decision.roomy

    def gather(self, unfinished: Sequence[tuple[Key, str | None]], eligible: Collection[str]) -> Collection[str] | None:
        """`DrawingFollower.gather`. It returns the destinations as soon as the number of unfinished samples reaches the
        threshold, and None before."""
        if self.destinations or not self.threshold or len(unfinished) > self.threshold or not unfinished:
            return None
        profiles = {name: self.profiles.get(name, ASSUMED) for name in sorted(eligible)}
        if self.roomy:
            profiles = {name: profile.roomy() for name, profile in profiles.items()}
        plan = plan_migration(list(unfinished), profiles, self.kv_per_sample)
        if plan is None:
            return None
        self.destinations, self.freed = plan.destinations, plan.freed
        self.moves, self.remaining = len(plan.moves), len(unfinished)
        return plan.destinations

    def may_score(self, scorer: str, idle: Callable[[str], bool]) -> bool:
        """Whether a scorer may work now. While samples are generated, it may if its own rollout has nothing left to
        generate."""
        return self.generated or (self.threshold is not None and idle(rollout_of(scorer)))


class Fusion:
    """Controls the threshold of a job. Its state is in the store, with a measured profile of each rollout group."""

    def __init__(self, spec: RLHFJobSpec, store: Store, log: Callable[..., None]) -> None:
        self._spec = spec
        self._store = store
        self._log = log
        self._assumed = replace(ASSUMED, max_samples=spec.generation.max_concurrent)
        self._controller = ThresholdController(spec.plan.inter_stage_fusion, spec.generation.max_tokens, spec.seed)
        saved = store.get(STORED)
        if saved is not None:
            self._controller.restore(saved)
        setting = spec.plan.inter_stage_fusion
        self._fraction = None if isinstance(setting, str) else setting
        self._roomy = not isinstance(setting, str)
        self.measurements: dict[str, Measurements] = {}

    def measured(self, group: str) -> Measurements:
        """The measured profile of a group's instances."""
        return self.measurements.setdefault(group, Measurements(self._assumed))

    def swapped(self, group: str, way: str, seconds: float) -> None:
        """Learn how long a rollout of the group took to go to sleep (`in`) or to wake up (`out`)."""
        known = self.measured(group)
        (known.swapped_in if way == "in" else known.swapped_out)(seconds)

    @asynccontextmanager
    async def stage(
        self,
        iteration: int,
        prompt_lengths: Sequence[int],
        instances: Sequence[Instance],
        block_tokens: int | None = None,
    ) -> AsyncIterator[StageFusion]:
        """The fusion of one iteration. Its threshold is computed while generation begins. Until then the last one is
        used. `prompt_lengths` has the tokens of each prompt. `block_tokens` is that of `StageProfile`. With `ppo.lag`,
        servers without samples draw the next iteration, so there is nothing to decide. Raises what the decision
        raises."""
        longest = max(prompt_lengths) + self._spec.generation.max_tokens
        known = {i.name: self.measured(i.group).profile() for i in instances}
        stage = StageFusion({name: replace(p, block_tokens=block_tokens) for name, p in known.items()}, longest)
        off = self._spec.plan.inter_stage_fusion == "Off"
        if self._spec.ppo.lag and not off:
            stage.provisional = 0
        if off or self._spec.ppo.lag or not instances:
            yield stage
            return
        profiles = [stage.profiles[i.name] for i in instances]
        stage.provisional = None if self._fraction is None else int(self._fraction * len(prompt_lengths))
        stage.roomy_before = self._roomy

        async def decide() -> None:
            stage.decision = await asyncio.to_thread(self._controller.decide, list(prompt_lengths), profiles)
            self._fraction, self._roomy = stage.decision.fraction, stage.decision.roomy
            self._log("fusion.decided", iteration=iteration, **describe(stage.decision))

        deciding = asyncio.create_task(decide())
        try:
            yield stage
            await deciding
        finally:
            deciding.cancel()

    def learn(self, groups: Mapping[str, str], generated: Generated, scoring: Sequence[Span]) -> None:
        """Learn the times of an iteration's requests. `groups` has the group of each rollout and scorer. `scoring` has
        one span for each batch."""
        for name, activity in generated.instances.items():
            known = self.measured(groups.get(name, name))
            for batch, (steps, seconds) in sorted(activity.decode.items()):
                known.decoded(batch, steps, seconds)
            for tokens, seconds in activity.prefills.values():
                known.prefilled(tokens, seconds)
        for span in scoring:
            known = self.measured(groups.get(span.process, span.process))
            known.scored(int(span.args["tokens"]), span.end - span.start)
        for destination, moves in arrivals(generated.migrations).items():
            known = self.measured(groups.get(destination, destination))
            known.migrated(sum(m.tokens for m in moves), max(m.seconds for m in moves))

    def end(self, response_lengths: Sequence[int]) -> None:
        """Learn the lengths of an iteration's responses, in tokens."""
        self._controller.observe(response_lengths)
        self._store.put(STORED, self._controller.as_json())


def arrivals(migrations: Sequence[Migration]) -> dict[str, list[Migration]]:
    """The samples of the tail that were prefilled, by destination. The last sample of a destination waited for all of
    them."""
    found: dict[str, list[Migration]] = {}
    for move in migrations:
        if (move.mechanism, move.reason) == ("tokens", "tail"):
            found.setdefault(move.destination, []).append(move)
    return found


def describe(decision: Decision) -> dict[str, Any]:
    """The fields for the event log."""
    return {
        "threshold": decision.threshold,
        "fraction": decision.fraction,
        "roomy": decision.roomy,
        "reason": decision.reason,
        "predicted_speedup": round(decision.predicted_speedup, 4),
    }
