"""Evaluates the policy's answers to held-out prompts before and after PPO, with measures that training does not use.

The learnt reward says how much the reward model likes the policy. A measure says whether the answers are good. The
built-in language has such a measure: its quality."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from dovetail.coordinator.data import synthetic
from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.seeds import derived_seed
from dovetail.coordinator.store.results import Results
from dovetail.coordinator.store.sample_files import SampleFiles
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.telemetry.summary import mean_ci95
from dovetail.manifest.types import RLHFJobSpec

# The prompts that are answered each time: a fraction of an iteration's.
PROMPTS = 64
BEFORE, AFTER = "before_ppo", "after_ppo"

# measure(prompts, responses): one number for each response.
Measure = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
# answer(slot, records, seeds): a response to each prompt, which the store keeps under `slot`.
Answer = Callable[[int, Sequence[PromptRecord], Sequence[int]], Awaitable[list[str]]]


def measures(spec: RLHFJobSpec) -> dict[str, Measure]:
    """The measures of a job's answers by name: the language's quality if all prompts are of the built-in language, else
    none."""
    if spec.data.prompts and all(source.synthetic is not None for source in spec.data.prompts):
        return {"quality": synthetic.qualities}
    return {}


class Evaluation:
    """Facts: evaluation.prompts, evaluation.<measure>.before_ppo and .after_ppo, each {mean, ci95}.

    Seeds depend on the prompt alone, so answers before and after PPO are drawn with the same noise. Training reads
    nothing of it."""

    def __init__(
        self, measures: Mapping[str, Measure], held_out: Callable[[], list[PromptRecord]], seed: int, answer: Answer
    ) -> None:
        self._measures = measures
        self._held_out = held_out
        self._seed = seed
        self._answer = answer

    async def run(
        self, when: str, iteration: int, store: Store, results: Results, texts: SampleFiles | None = None
    ) -> None:
        """Answer with the weights of `iteration`, and measure. Does nothing if that is done already, or if there is no
        measure.

        `when`: BEFORE or AFTER, the fact's name. `texts` keeps the answers as text."""
        if not self._measures or store.get(f"evaluation/{when}") == iteration:
            return
        records = self._held_out()[:PROMPTS]
        if not records:
            return
        seeds = [derived_seed("evaluation", self._seed, record.index) for record in records]
        responses = await self._answer(slot(iteration), records, seeds)
        measured: dict[str, list[float]] = {}
        for name, measure in self._measures.items():
            measured[name] = values = [float(v) for v in measure([r.text for r in records], responses)]
            results.fact(f"evaluation.{name}.{when}", mean_ci95(values))
        if texts is not None:
            answers = zip(records, responses, zip(*measured.values(), strict=True), strict=True)
            with contextlib.suppress(OSError):
                texts.write_held_out(
                    when,
                    [
                        {"prompt": r.text, "response": text, "measures": dict(zip(measured, values, strict=True))}
                        for r, text, values in answers
                    ],
                )
        results.fact("evaluation.prompts", len(records))
        store.put(f"evaluation/{when}", iteration)
        store.samples.forget(slot(iteration))


def slot(iteration: int) -> int:
    """The iteration number under which the table of samples keeps these answers until they are measured. It is
    negative, so training never reads them."""
    return -1 - iteration
