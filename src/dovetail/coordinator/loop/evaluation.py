"""What the policy answers to held-out prompts before and after PPO, graded by measures that no training sees.

The learnt reward says how well the policy pleases the reward model; a measure says whether that is worth having. The
built-in language has one of its own, its quality."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from dovetail.coordinator.data import synthetic
from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.seeds import derived_seed
from dovetail.coordinator.store.results import Results
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.telemetry.summary import mean_ci95
from dovetail.manifest.types import RLHFJobSpec

# Prompts answered each time; a fraction of an iteration's.
PROMPTS = 64
BEFORE, AFTER = "before_ppo", "after_ppo"

# measure(prompts, responses): one number for each response.
Measure = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
# answer(slot, records, seeds): a response to each prompt, which the store keeps under `slot`.
Answer = Callable[[int, Sequence[PromptRecord], Sequence[int]], Awaitable[list[str]]]


def measures(spec: RLHFJobSpec) -> dict[str, Measure]:
    """What a job's answers are measured by: the language's quality, where all its prompts are of the language."""
    if spec.data.prompts and all(source.synthetic is not None for source in spec.data.prompts):
        return {"quality": synthetic.qualities}
    return {}


class Evaluation:
    """Facts: evaluation.prompts, evaluation.<measure>.before_ppo and .after_ppo, each {mean, ci95}.

    Seeds depend on the prompt alone, so that both moments draw alike; nothing that training reads is changed."""

    def __init__(
        self, measures: Mapping[str, Measure], held_out: Callable[[], list[PromptRecord]], seed: int, answer: Answer
    ) -> None:
        self._measures = measures
        self._held_out = held_out
        self._seed = seed
        self._answer = answer

    async def run(self, when: str, iteration: int, store: Store, results: Results) -> None:
        """Answer with the weights of `iteration` and measure; nothing where that is done, or nothing can be measured.

        `when`: BEFORE or AFTER, the fact's name."""
        if not self._measures or store.get(f"evaluation/{when}") == iteration:
            return
        records = self._held_out()[:PROMPTS]
        if not records:
            return
        seeds = [derived_seed("evaluation", self._seed, record.index) for record in records]
        responses = await self._answer(slot(iteration), records, seeds)
        for name, measure in self._measures.items():
            values = [float(v) for v in measure([r.text for r in records], responses)]
            results.fact(f"evaluation.{name}.{when}", mean_ci95(values))
        results.fact("evaluation.prompts", len(records))
        store.put(f"evaluation/{when}", iteration)
        store.samples.forget(slot(iteration))


def slot(iteration: int) -> int:
    """Where the answers of an iteration's weights lie in the table of samples until they are measured: below 0, where
    no training looks."""
    return -1 - iteration
