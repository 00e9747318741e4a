"""Runs generation and inference of one iteration, as fusion decides. Each sample is scored as soon as fusion allows
it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.fusion.fusion import StageFusion
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.lineup import Turn
from dovetail.coordinator.samples.scoring import Finished
from dovetail.coordinator.samples.session_drawing import Episodes
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Key, SampleTable, State


class Scoring(Protocol):
    """Takes finished samples. `dovetail.coordinator.samples.scoring.Inference` implements it."""

    def add(self, samples: Iterable[Finished]) -> None: ...
    def follow(self, left: int, growing: Callable[[], Sequence[Growing]]) -> None: ...
    def poke(self) -> None: ...
    def check(self) -> None: ...
    async def finish(self, deadline_seconds: float) -> None: ...


class FusedStage(DrawingFollower):
    """Generates and scores an iteration. `inference` must ask `fusion.may_score`. `on_progress(done, total)` follows
    generation."""

    def __init__(
        self,
        turn: Turn,
        samples: SampleTable,
        generator: Generator | Episodes,
        inference: Scoring,
        fusion: StageFusion,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._turn, self._samples, self._generator = turn, samples, generator
        self._inference, self._fusion, self._on_progress = inference, fusion, on_progress

    async def run(self, deadline_seconds: float, phase: Callable[[str], AbstractContextManager[None]]) -> Generated:
        """Returns when `on_scores` of `inference` has had every sample of the iteration that was not scored before.

        `deadline_seconds` is the longest time without a scored sample. `phase` measures two times: "generation" until
        the last sample is generated, and "inference" after that. Open iterations are scored one after another. Raises
        what generation and inference raise."""
        before = self._samples.samples(self._turn.iteration, State.GENERATED)
        self._inference.add(Finished(s.key, s.prompt_tokens, s.tokens) for s in before)
        with phase("generation"):
            done = await self._generator.generate(self._turn, self)
        await self._turn.wait_first()
        with phase("inference"):
            self._fusion.generated = True
            await self._inference.finish(deadline_seconds)
        return done

    def finished(self, samples: Sequence[Finished]) -> None:
        self._inference.add(samples)

    def progress(self, done: int, total: int, tokens: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, total)
        self._inference.check()
        if self._fusion.threshold is not None:
            self._inference.follow(total - done, lambda: self._generator.growing(self._turn.iteration))
        # The set of idle rollouts may have changed.
        self._inference.poke()

    def gathers_at(self) -> int:
        return 0 if self._fusion.destinations else self._fusion.threshold or 0

    def gather(self, unfinished: Sequence[tuple[Key, str | None]], able: Collection[str]) -> Collection[str] | None:
        return self._fusion.gather(unfinished, able)
