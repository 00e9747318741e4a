"""Compares what a run trained with what its manifest says: which prompts, how often, in which iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.coordinator.store.outcomes import Fate, FatePart
from dovetail.manifest.types import RLHFJobSpec

# A list of what is wrong has at most this many sentences.
MOST_PROBLEMS = 20
BINS = 4


@dataclass
class PromptUse:
    """One prompt by its text. The numbers count samples, and `iterations` are those that trained it."""

    tokens: int
    outcomes: Counter[str] = field(default_factory=Counter)
    iterations: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Audit:
    """`done` is the last finished iteration. `problems` has one sentence for each prompt or iteration that was not
    trained as the manifest says. `prompts` has each prompt by the number that stands for its tokens."""

    done: int
    parts: Sequence[FatePart]
    problems: Sequence[str]
    prompts: Mapping[int, PromptUse]

    def count(self, outcome: Fate) -> int:
        """The number of samples with this outcome."""
        return sum(len(part.rows) for part in self.parts if part.outcome is outcome)

    def sentence(self) -> str:
        """What the audit found, in one sentence."""
        if not self.done:
            return "No iteration is finished, so no prompt was trained."
        trained, prompts = self.count(Fate.TRAINED), sum(bool(p.iterations) for p in self.prompts.values())
        what = f"iterations 1 to {self.done} trained {trained:,} samples of {prompts:,} different prompts"
        if not self.problems:
            return f"Each prompt was trained exactly as the manifest says: {what}."
        count = len(self.problems)
        return f"Not trained as the manifest says: {count} finding{'s' if count > 1 else ''}; {what}."


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
    problems: list[str] = []
    by_iteration: dict[int, list[FatePart]] = {}
    for part in finished:
        by_iteration.setdefault(part.iteration, []).append(part)
    for iteration in range(1, done + 1):
        replaced = records(f"ppo/{iteration}/replaced") or []
        texts = None if expected is None else expected(iteration)
        problems += _problems(spec, iteration, by_iteration.get(iteration, []), replaced, texts)
    return Audit(done, finished, problems, _prompts(finished))


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
    rows = np.concatenate(trained)
    each, first = spec.ppo.samples_per_prompt, spec.ppo.global_batch_size // spec.ppo.samples_per_prompt
    gone = {position for positions in replaced for position in positions}
    wanted = set(range(first + len(gone))) - gone
    counts = Counter(rows["prompt"].tolist())
    for position in sorted(wanted | counts.keys()):
        where, count = f"iteration {iteration}, prompt {position}", counts.get(position, 0)
        if position not in wanted:
            found.append(f"{where}: trained, though it was replaced or is not of this iteration")
        elif count != each:
            found.append(f"{where}: {count} of {each} samples were trained")
        elif texts is not None:
            other = set(rows["text"][rows["prompt"] == position].tolist()) - {texts[position]}
            found += [f"{where}: another prompt was trained than the data has there"] if other else []
    dropped = Counter(p for part in parts if part.outcome is Fate.EQUAL_REWARDS for p in part.rows["prompt"].tolist())
    found += [
        f"iteration {iteration}, prompt {position}: replaced, but its {each} samples have no record"
        for position in sorted(gone)
        if dropped.get(position) != each
    ]
    return found


def _prompts(parts: Sequence[FatePart]) -> dict[int, PromptUse]:
    found: dict[int, PromptUse] = {}
    for part in parts:
        texts, index, counts = np.unique(part.rows["text"], return_index=True, return_counts=True)
        for text, row, count in zip(texts.tolist(), index.tolist(), counts.tolist(), strict=True):
            prompt = found.setdefault(text, PromptUse(int(part.rows["prompt_tokens"][row])))
            prompt.outcomes[part.outcome] += count
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


def by_range(found: Audit, column: str) -> list[tuple[str, Counter[Fate]]]:
    """For at most BINS ranges of a column of ROW, with about as many samples each: the range, and the number of samples
    by outcome."""
    columns = [(part.outcome, part.rows[column]) for part in found.parts]
    values = np.concatenate([each for _, each in columns]) if columns else np.empty(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    edges = np.unique(np.quantile(values, np.linspace(0, 1, BINS + 1), method="inverted_cdf"))
    ranges: list[tuple[str, Counter[Fate]]] = []
    for low, high in zip([-np.inf, *edges[1:-1]], edges[1:] if len(edges) > 1 else edges, strict=True):
        counts: Counter[Fate] = Counter()
        for outcome, each in columns:
            counts[outcome] += int(((each > low) & (each <= high)).sum())
        within = values[(values > low) & (values <= high)]
        ranges.append((f"{within.min():.4g} to {within.max():.4g}", counts))
    return ranges


def summary_of(found: Audit) -> dict[str, Any]:
    """The audit in summary.json."""
    counts = {outcome.value: found.count(outcome) for outcome in Fate}
    return {"sentence": found.sentence(), "samples": counts, "problems": list(found.problems[:MOST_PROBLEMS])}
