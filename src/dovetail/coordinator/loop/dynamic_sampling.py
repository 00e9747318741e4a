"""DAPO's dynamic sampling. A group baseline learns nothing from a prompt whose samples all have the same reward. Such
prompts are replaced by others, which are answered in turn, for a limited number of rounds.

The choice of prompts depends only on the manifest and on rewards. A decision and its new samples are stored together,
so a restarted coordinator continues with the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.store.samples import NewSample
from dovetail.coordinator.store.store import Store

# further(round, number of prompts, texts that the iteration has used) returns other prompts.
Further = Callable[[int, int, Collection[str]], list[PromptRecord]]


class IterationPrompts:
    """The prompts of one iteration. `records` has all prompts by their position in the table of samples. A replaced
    prompt keeps its position. `current` has the positions of the prompts that count, and `newest` those of the last
    round. `round` is the number of the last round, counted from 0."""

    def __init__(
        self,
        iteration: int,
        first: Sequence[PromptRecord],
        store: Store,
        samples_of: Callable[[int, PromptRecord], list[NewSample]],
        rounds: int = 0,
        further: Further | None = None,
    ) -> None:
        """`samples_of` makes the samples of a prompt from its position. `rounds` is the maximum number of further
        rounds. `further` gives their prompts."""
        self.iteration, self._store, self._samples_of = iteration, store, samples_of
        self._rounds = 0 if further is None else rounds
        self._further = further
        self.records = list(first)
        self.current = list(range(len(first)))
        self.newest = self.current
        self.round = 0
        for gone in store.get(self._key) or []:
            self._take(gone)

    @property
    def replaced(self) -> int:
        """The number of prompts that were replaced so far."""
        return len(self.records) - len(self.current)

    def samples(self) -> list[NewSample]:
        """The samples of the prompts that count."""
        return [sample for position in self.current for sample in self._samples_of(position, self.records[position])]

    def replace_equal(self) -> bool:
        """Replace the prompts whose samples all have the same reward. Returns whether there are new samples to draw.
        Raises StoreError."""
        if self.round == self._rounds:
            return False
        gone = equal_prompts(self._store, self.iteration)
        if not gone:
            return False
        before = self._store.get(self._key) or []
        self._take(gone)
        samples = [sample for position in self.newest for sample in self._samples_of(position, self.records[position])]
        self._store.replace_prompts(self.iteration, gone, samples, {self._key: [*before, gone]})
        return True

    def _take(self, gone: Sequence[int]) -> None:
        """Put other prompts in the place of the prompts `gone`."""
        assert self._further is not None
        self.round += 1
        others = self._further(self.round, len(gone), {record.text for record in self.records})
        start = len(self.records)
        self.records += [replace(record, index=start + i) for i, record in enumerate(others)]
        self.newest = list(range(start, len(self.records)))
        self.current = [position for position in self.current if position not in set(gone)] + self.newest

    @property
    def _key(self) -> str:
        return replaced_key(self.iteration)


def replaced_key(iteration: int) -> str:
    """The store's key of the prompts that each further round replaced."""
    return f"ppo/{iteration}/replaced"


def equal_prompts(store: Store, iteration: int) -> list[int]:
    """The positions of the prompts whose samples all have the same reward and the same rewards of steps, in ascending
    order."""
    steps = store.samples.steps(iteration)
    found: dict[int, set[str]] = {}
    for key, reward in store.samples.scored_rewards(iteration).items():
        of_steps = sorted((name, [r for _, r in each]) for name, each in steps.get(key, {}).items())
        found.setdefault(key.prompt, set()).add(repr((reward, of_steps)))
    return sorted(prompt for prompt, rewards in found.items() if len(rewards) == 1)
