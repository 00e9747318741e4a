"""Compares what a run trained with what its manifest says: which prompts, how often, in which iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.coordinator.store.outcomes import Fate, FatePart, counts_key
from dovetail.manifest.types import RLHFJobSpec

# A list of what is wrong has at most this many sentences.
MOST_PROBLEMS = 20
BINS = 4
# What becomes of the samples of a batch.
_OF_BATCH = (Fate.TRAINED, Fate.EPISODE_DISCARDED, Fate.ALONE)


@dataclass
class PromptUse:
    """One prompt by its text. The numbers count samples, and `iterations` are those that trained it."""

    tokens: int
    outcomes: Counter[str] = field(default_factory=Counter)
    iterations: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Audit:
    """`done` is the last finished iteration. `problems` has one sentence for each prompt or iteration that was not
    trained as the manifest says. `prompts` has each prompt by the number that stands for its tokens. `counts` has the
    sums of `BatchOutcome.counts`."""

    done: int
    parts: Sequence[FatePart]
    problems: Sequence[str]
    prompts: Mapping[int, PromptUse]
    counts: Mapping[str, int]

    @property
    def samples(self) -> dict[str, int]:
        """The number of samples by `FatePart.name`, those that were trained first."""
        found = dict.fromkeys([Fate.TRAINED.value, *(part.name for part in self.parts)], 0)
        for part in self.parts:
            found[part.name] += len(part.rows)
        return found

    def sentence(self) -> str:
        """What the audit found, in one sentence, and what became of the episodes, if there are any, in another."""
        if not self.done:
            return "No iteration is finished, so no prompt was trained."
        trained, prompts = self.samples[Fate.TRAINED], sum(bool(p.iterations) for p in self.prompts.values())
        kind = "episodes" if self.counts else "samples"
        what = f"iterations 1 to {self.done} trained {trained:,} {kind} of {prompts:,} different prompts"
        if not self.problems:
            found = f"Each prompt was trained exactly as the manifest says: {what}."
        else:
            count = len(self.problems)
            found = f"Not trained as the manifest says: {count} finding{'s' if count > 1 else ''}; {what}."
        return f"{found} {self._of_episodes()}".rstrip()

    def _of_episodes(self) -> str:
        if not self.counts:
            return ""
        causes = Counter[str]()
        for part in self.parts:
            causes[part.cause] += len(part.rows) if part.outcome is Fate.EPISODE_DISCARDED else 0
        left = self.samples.get(Fate.ALONE, 0)
        told = [
            f"{self.counts['branches']:,} branches",
            f"{self.counts['calls']:,} calls of tools, {self.counts['unanswered']:,} of them without an answer",
            *(f"{count:,} discarded ({cause})" for cause, count in sorted(causes.items()) if count),
            *([f"{left:,} with no other to compare with"] if left else []),
        ]
        return f"Episodes: {'; '.join(told)}."


def audit(
    spec: RLHFJobSpec,
    records: Callable[[str], Any],
    parts: Sequence[FatePart],
    expected: Callable[[int], Sequence[int]] | None = None,
) -> Audit:
    """Compare the outcomes of a run's samples with its manifest. `records(key)` reads the store. `expected(iteration)`
    has for each position the number that stands for its prompt's tokens. Without it, only numbers of prompts and
    samples are compared."""
    done = int((records("ppo/progress") or {"step": 0})["step"])
    finished = [part for part in parts if part.iteration <= done]
    problems, counts = list[str](), Counter[str]()
    by_iteration: dict[int, list[FatePart]] = {}
    for part in finished:
        by_iteration.setdefault(part.iteration, []).append(part)
    for iteration in range(1, done + 1):
        replaced = records(f"ppo/{iteration}/replaced") or []
        texts = None if expected is None else expected(iteration)
        counted = records(counts_key(iteration))
        if spec.sessions is not None and counted is None:
            by_iteration.pop(iteration, None)  # an earlier release did not tell episodes apart
        problems += _problems(spec, iteration, by_iteration.get(iteration, []), replaced, texts)
        counts.update(counted or {})
    return Audit(done, finished, problems, _prompts(finished), counts)


def _problems(
    spec: RLHFJobSpec,
    iteration: int,
    parts: Sequence[FatePart],
    replaced: Sequence[Sequence[int]],
    texts: Sequence[int] | None,
) -> list[str]:
    trained = [part.rows for part in parts if part.outcome is Fate.TRAINED]
    if not trained:
        return [f"iteration {iteration} has no record of what it trained; an earlier release may have run it"]
    found = []
    if len(trained) > 1:
        found.append(f"iteration {iteration} was trained {len(trained)} times")
    rows = np.concatenate([part.rows for part in parts if part.outcome in _OF_BATCH])
    each, first = spec.ppo.samples_per_prompt, spec.ppo.global_batch_size // spec.ppo.samples_per_prompt
    gone = {position for positions in replaced for position in positions}
    wanted = set(range(first + len(gone))) - gone
    counts = Counter(rows["prompt"].tolist())
    kind = "samples were trained" if spec.sessions is None else "episodes were trained or discarded"
    for position in sorted(wanted | counts.keys()):
        where, count = f"iteration {iteration}, prompt {position}", counts.get(position, 0)
        if position not in wanted:
            found.append(f"{where}: trained, though it was replaced or is not of this iteration")
        elif count != each:
            found.append(f"{where}: {count} of {each} {kind}")
        elif texts is not None:
            other = set(rows["text"][rows["prompt"] == position].tolist()) - {texts[position]}
            found += [f"{where}: another prompt was trained than the data has there"] if other else []
    learnt, alone, dropped = (_positions(parts, fate) for fate in (Fate.TRAINED, Fate.ALONE, Fate.EQUAL_REWARDS))
    for position in sorted(learnt.keys() | alone.keys()):
        left = learnt[position] + alone[position]
        if learnt[position] != (0 if spec.sessions and spec.ppo.compares_samples and left == 1 else left):
            found.append(
                f"iteration {iteration}, prompt {position}: {learnt[position]} of the {left} episodes that were not "
                "discarded were trained"
            )
    found += [
        f"iteration {iteration}, prompt {position}: replaced, but its {each} samples have no record"
        for position in sorted(gone)
        if dropped.get(position) != each
    ]
    return found


def _positions(parts: Sequence[FatePart], outcome: Fate) -> Counter[int]:
    """The number of samples with an outcome, by the position of their prompt."""
    return Counter(p for part in parts if part.outcome is outcome for p in part.rows["prompt"].tolist())


def _prompts(parts: Sequence[FatePart]) -> dict[int, PromptUse]:
    found: dict[int, PromptUse] = {}
    for part in parts:
        texts, index, counts = np.unique(part.rows["text"], return_index=True, return_counts=True)
        for text, row, count in zip(texts.tolist(), index.tolist(), counts.tolist(), strict=True):
            prompt = found.setdefault(text, PromptUse(int(part.rows["prompt_tokens"][row])))
            prompt.outcomes[part.name] += count
            if part.outcome is Fate.TRAINED:
                prompt.iterations.append(part.iteration)
    return found


def by_times(found: Audit, known: int | None = None) -> list[tuple[int, int]]:
    """(number of iterations that trained it, number of prompts), in ascending order. `known` is the number of different
    prompts in the data: those that no iteration trained count as 0."""
    counts = Counter(len(prompt.iterations) for prompt in found.prompts.values())
    if known is not None:
        counts[0] = known - sum(number for times, number in counts.items() if times)
    return sorted((times, number) for times, number in counts.items() if number)


def by_range(found: Audit, column: str) -> list[tuple[str, Counter[str]]]:
    """For at most BINS ranges of a column of ROW, with about as many samples each: the range, and the number of samples
    by `FatePart.name`. Discarded episodes have a prompt only."""
    columns = [
        (part.name, part.rows[column])
        for part in found.parts
        if column == "prompt_tokens" or part.outcome is not Fate.EPISODE_DISCARDED
    ]
    values = np.concatenate([each for _, each in columns]) if columns else np.empty(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    edges = np.unique(np.quantile(values, np.linspace(0, 1, BINS + 1), method="inverted_cdf"))
    ranges: list[tuple[str, Counter[str]]] = []
    for low, high in zip([-np.inf, *edges[1:-1]], edges[1:] if len(edges) > 1 else edges, strict=True):
        counts: Counter[str] = Counter()
        for name, each in columns:
            counts[name] += int(((each > low) & (each <= high)).sum())
        within = values[(values > low) & (values <= high)]
        ranges.append((f"{within.min():.4g} to {within.max():.4g}", counts))
    return ranges


def summary_of(found: Audit) -> dict[str, Any]:
    """The audit in summary.json."""
    told = {"sentence": found.sentence(), "samples": found.samples, "episodes": found.counts}
    return told | {"problems": list(found.problems[:MOST_PROBLEMS])}
