"""Runs generation and inference of one iteration, as fusion decides. Each sample is scored as soon as fusion allows
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dovetail.coordinator.samples.fusion.fusion import StageFusion
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.lineup import Turn
from dovetail.coordinator.samples.scoring import Finished
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Sample, SampleTable, State


class Scoring(Protocol):
    """Takes finished samples. `dovetail.coordinator.samples.scoring.Inference` implements it."""

    def add(self, samples: Iterable[Finished]) -> None: ...
    def follow(self, left: int, growing: Callable[[], Sequence[Growing]]) -> None: ...
    def poke(self) -> None: ...
    def check(self) -> None: ...
    async def finish(self, deadline_seconds: float) -> None: ...


def _finished(sample: Sample) -> Finished:
    return Finished(sample.key, sample.prompt_tokens, sample.tokens)


async def generate_and_score(
    iteration: int,
    samples: SampleTable,
    generator: Generator,
    inference: Scoring,
    fusion: StageFusion,
    deadline_seconds: float,
    phase: Callable[[str], AbstractContextManager[None]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    turn: Turn | None = None,
) -> Generated:
    """Generate and score an iteration. Returns when `on_scores` of `inference` has had every sample of the iteration
    that was not scored before.

    `inference` must ask `fusion.may_score`. `deadline_seconds` is the longest time without a scored sample. `phase`
    measures two times: "generation" until the last sample is generated, and "inference" after that. `on_progress(done,
    total)` follows generation. `turn` is the iteration's place among several open ones. They are scored one after
    another, and the turn decides which servers draw which iteration. Raises what generation and inference raise."""

    def progress(done: int, total: int, tokens: int) -> None:
        on_progress(done, total)
        inference.check()
        if fusion.threshold is not None:
            inference.follow(total - done, lambda: generator.growing(iteration))
        # The set of idle rollouts may have changed.
        inference.poke()

    inference.add(_finished(s) for s in samples.samples(iteration, State.GENERATED))
    with phase("generation"):
        done = await generator.generate(
            iteration,
            on_finished=lambda sample: inference.add([_finished(sample)]),
            progress=progress,
            tail=fusion.gather if turn is None else None,
            turn=turn,
        )
    if turn is not None:
        await turn.wait_first()
    with phase("inference"):
        fusion.generated = True
        await inference.finish(deadline_seconds)
    return done
