"""Inference with models on unlike scorers: each sample goes to one scorer of every kind, the answers are merged.

A *lane* is a set of models that are always asked for together. Where every scorer holds everything there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType

from dovetail.coordinator.scoring.scoring import Finished, Inference, Scores
from dovetail.coordinator.store.samples import Key

Lane = tuple[str, ...]


def lanes_of(want: Sequence[str], holders: Sequence[Collection[str]]) -> list[Lane]:
    """`want` in as few lanes as possible, such that each holder holds all of a lane or nothing of it.

    `holders`: what each scorer holds. Raises ValueError for a model that none holds."""
    lanes: dict[frozenset[int], list[str]] = {}
    for model in want:
        where = frozenset(index for index, held in enumerate(holders) if model in held)
        if not where:
            raise ValueError(f"the plan lets no scorer hold the {model} model")
        lanes.setdefault(where, []).append(model)
    return [tuple(models) for models in lanes.values()]


class Lanes:
    """One `Inference` a lane behind the interface of one. `make(lane, on_scores)` builds a lane's; `on_scores` gets a
    sample's scores once all lanes have theirs."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        make: Callable[[Lane, Callable[[list[Scores]], None]], Inference],
        on_scores: Callable[[list[Scores]], None],
    ) -> None:
        self._parts: dict[Key, list[Scores]] = {}
        self._count = len(lanes)
        self._on_scores = on_scores
        self._stack = AsyncExitStack()
        self._lanes = [make(lane, self._collect) for lane in lanes]

    async def __aenter__(self) -> Lanes:
        for lane in self._lanes:
            await self._stack.enter_async_context(lane)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def add(self, samples: Iterable[Finished]) -> None:
        """Score these, too."""
        new = list(samples)
        for lane in self._lanes:
            lane.add(new)

    def poke(self) -> None:
        """Ask for scorers again."""
        for lane in self._lanes:
            lane.poke()

    def check(self) -> None:
        """Raises what handling scores raised."""
        for lane in self._lanes:
            lane.check()

    async def finish(self, deadline_seconds: float) -> None:
        """Wait until everything that was added is scored. Raises TimeoutError, and what `check` raises."""
        finishing = [asyncio.create_task(lane.finish(deadline_seconds)) for lane in self._lanes]
        try:
            await asyncio.gather(*finishing)
        finally:
            for task in finishing:
                task.cancel()

    def _collect(self, answer: list[Scores]) -> None:
        whole = []
        for scores in answer:
            parts = self._parts.setdefault(scores.key, [])
            parts.append(scores)
            if len(parts) == self._count:
                whole.append(merged(self._parts.pop(scores.key)))
        if whole:
            self._on_scores(whole)


def merged(parts: Sequence[Scores]) -> Scores:
    """Of one sample, from scorers that each gave what the others did not."""
    found = parts[0]
    for part in parts[1:]:
        found = replace(
            found,
            ref_logprobs=part.ref_logprobs if found.ref_logprobs is None else found.ref_logprobs,
            values=part.values if found.values is None else found.values,
            score=part.score if found.score is None else found.score,
        )
    return found
