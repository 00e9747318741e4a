"""Runs inference on scorers that hold different models. Each sample goes to one scorer of each kind, and the answers
are merged.

A *model set* has models that are always requested together. If every scorer holds all models, there is one set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType

from dovetail.coordinator.samples.scoring import Finished, Inference, Scores
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Key

ModelSet = tuple[str, ...]


def model_sets(want: Sequence[str], holders: Sequence[Collection[str]]) -> list[ModelSet]:
    """Divide the models of `want` into as few sets as possible, so that each scorer holds all models of a set or none.
    `holders` has the models of each scorer. Raises ValueError for a model that no scorer holds."""
    sets: dict[frozenset[int], list[str]] = {}
    for model in want:
        where = frozenset(index for index, held in enumerate(holders) if model in held)
        if not where:
            raise ValueError(f"the plan lets no scorer hold the {model} model")
        sets.setdefault(where, []).append(model)
    return [tuple(models) for models in sets.values()]


class InferenceOfSets:
    """One `Inference` for each model set, with the interface of a single one. `make(models, on_scores)` builds the
    `Inference` of a set. `on_scores` gets a sample's scores once all sets have scored it. Without sets that is at once,
    without scores."""

    def __init__(
        self,
        sets: Sequence[ModelSet],
        make: Callable[[ModelSet, Callable[[list[Scores]], None]], Inference],
        on_scores: Callable[[list[Scores]], None],
    ) -> None:
        self._parts: dict[Key, list[Scores]] = {}
        self._count = len(sets)
        self._on_scores = on_scores
        self._stack = AsyncExitStack()
        self._inferences = [make(models, self._collect) for models in sets]

    async def __aenter__(self) -> InferenceOfSets:
        for inference in self._inferences:
            await self._stack.enter_async_context(inference)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def add(self, samples: Iterable[Finished]) -> None:
        """Add samples to be scored."""
        new = list(samples)
        for inference in self._inferences:
            inference.add(new)
        if not self._inferences and new:
            self._on_scores([Scores(sample.key, None, None, None) for sample in new])

    def follow(self, left: int, growing: Callable[[], Sequence[Growing]]) -> None:
        """Let scorers compute parts of samples that are still generated."""
        for inference in self._inferences:
            inference.follow(left, growing)

    def poke(self) -> None:
        """Ask again which scorers are free."""
        for inference in self._inferences:
            inference.poke()

    def check(self) -> None:
        """Raise what the handling of scores has raised."""
        for inference in self._inferences:
            inference.check()

    async def finish(self, deadline_seconds: float) -> None:
        """Wait until all added samples are scored. Raises TimeoutError, and what `check` raises."""
        finishing = [asyncio.create_task(inference.finish(deadline_seconds)) for inference in self._inferences]
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
    """The scores of one sample, merged from the answers of several scorers."""
    found = parts[0]
    for part in parts[1:]:
        found = replace(
            found,
            ref_logprobs=part.ref_logprobs if found.ref_logprobs is None else found.ref_logprobs,
            values=part.values if found.values is None else found.values,
            score=part.score if found.score is None else found.score,
        )
    return found
