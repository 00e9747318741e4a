"""Runs inference on scorers that hold different models. Each sample goes to one scorer of each kind, and the answers
are merged.

A *model set* has models that are always requested together. If every scorer holds all models, there is one set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.samples.scoring import Finished, Inference, Scores
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.episodes import BranchPlace, part_of
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
    without scores. `branches` says where in a response its branches are (`StoredEpisode.branches`). Each is scored as a
    sequence of its own."""

    def __init__(
        self,
        sets: Sequence[ModelSet],
        make: Callable[[ModelSet, Callable[[list[Scores]], None]], Inference],
        on_scores: Callable[[list[Scores]], None],
        branches: Callable[[Key], Sequence[BranchPlace]] = lambda _: (),
    ) -> None:
        self._parts: dict[Key, list[Scores]] = {}
        self._count = len(sets)
        self._branches = branches
        self._apart: dict[Key, _InBranches] = {}
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
        if not self._inferences:
            if new:
                self._on_scores([Scores(sample.key, None, None, None) for sample in new])
            return
        sequences = [part for sample in new for part in self._sequences(sample)]
        for inference in self._inferences:
            inference.add(sequences)

    def _sequences(self, sample: Finished) -> list[Finished]:
        """What scorers get of a sample: the sample, or each branch of its episode."""
        if len(branches := self._branches(sample.key)) < 2:
            return [sample]
        apart = _InBranches(sample, branches)
        self._apart |= dict.fromkeys((part.key for part in apart.parts), apart)
        return apart.parts

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
                found = merged(self._parts.pop(scores.key))
                apart = self._apart.pop(scores.key, None)
                whole += [found] if apart is None else apart.add(found)
        if whole:
            self._on_scores(whole)


class _InBranches:
    """A sample whose branches are scored as the samples `parts`, until all of them are."""

    def __init__(self, sample: Finished, branches: Sequence[BranchPlace]) -> None:
        self._key, self._branches, self._size = sample.key, branches, len(sample.response)
        self._scores: dict[Key, Scores] = {}
        said = sample.response
        self.parts = [
            Finished(
                part_of(sample.key, number),
                said[each.begin : each.answer] if each.begin else sample.prompt,
                said[each.answer : each.end],
            )
            for number, each in enumerate(branches)
        ]

    def add(self, scores: Scores) -> list[Scores]:
        """Note the scores of a branch. Returns those of the sample if this was the last one."""
        self._scores[scores.key] = scores
        if len(self._scores) < len(self.parts):
            return []
        found = [self._scores[part.key] for part in self.parts]
        references, values = ([getattr(each, name) for each in found] for name in ("ref_logprobs", "values"))
        return [Scores(self._key, self._joined(references), self._joined(values), None)]

    def _joined(self, rows: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
        """What is known of the tokens of each branch, as one row for the response. It is 0 at prompts."""
        whole = np.zeros(self._size, np.float32)
        for each, row in zip(self._branches, rows, strict=True):
            if row is None:
                return None
            whole[each.answer : each.end] = row
        return whole


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
