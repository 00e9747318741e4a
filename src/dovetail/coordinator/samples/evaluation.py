"""Evaluates versions of the weights. The policy answers prompts that are never trained on. The answers are measured and
compared, and the best weights may be kept.

The results depend only on the manifest and the weights. A seed depends only on the prompt and the sample's number. So
all versions are drawn with the same noise, on any server. Training reads none of the results, so a run with evaluations
ends with the same weights as a run without.

If the job begins with SFT, the model before SFT answers the prompts too. Its answers are drawn when the rollouts are
there, which is just before PPO."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.reporting.results import mean_ci95
from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT
from dovetail.coordinator.rewards.calls import evaluation_slot
from dovetail.coordinator.samples.evaluation_metrics import EvaluationMetrics, HeldOutAnswer
from dovetail.manifest.types import Evaluation, RLHFJobSpec
from dovetail.protocol.files.run_rows import EVALUATION
from dovetail.protocol.sampling import derived_seed

BEFORE, AFTER = "before_ppo", "after_ppo"
BEFORE_SFT_FACT = "before_sft"
# The store's key of an evaluation's results, followed by the version of the weights.
FOUND = "evaluation/at"
# The key of the results of the model before SFT. They take no part in comparisons of PPO's versions.
FOUND_BEFORE_SFT = "evaluation/before_sft"
# These settings change neither the answers nor the measures. So results from before and after a change of them can be
# compared.
_WHEN = ("everyIterations", "keepBest", "stopAfterNoGain")

# answer(version, prompts, seeds of each prompt's samples, temperature, rewarded)
Answering = Callable[
    [int, Sequence[PromptRecord], Sequence[Sequence[int]], float | None, bool], Awaitable[list[HeldOutAnswer]]
]


@dataclass(frozen=True)
class EvaluationResult:
    """The results of one evaluation, after iteration `version`. `metrics` has the mean and ci95 of each metric. ci95 is
    half the width of the 95% interval over prompts."""

    version: int
    metrics: Mapping[str, Mapping[str, float]]

    def mean(self, metric: str) -> float:
        return self.metrics[metric]["mean"]


def best_of(found: Sequence[EvaluationResult], metric: str) -> EvaluationResult | None:
    """The evaluation with the highest mean of `metric`. If several are equal, it is the earliest. None if there is
    none."""
    return max(found, key=lambda one: (one.mean(metric), -one.version), default=None)


def without_gain(found: Sequence[EvaluationResult], metric: str) -> int:
    """The number of evaluations since the best one that have not raised the highest mean of `metric`."""
    best = best_of(found, metric)
    return 0 if best is None else sum(one.version > best.version for one in found)


class Evaluator:
    """Runs the evaluations of a job, and stores their results.

    Facts: evaluation.prompts, evaluation.<metric>.before_ppo and .after_ppo, each {mean, ci95}. If the job runs SFT,
    there is also evaluation.<metric>.before_sft. With evaluations during PPO there is also evaluation.best {iteration,
    metric, mean, ci95}."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        prompts: Callable[[], list[PromptRecord]],
        metrics: EvaluationMetrics,
        answer: Answering,
        records: RunRecords,
    ) -> None:
        self._spec, self._seed = spec.evaluation, spec.seed
        self._make_prompts, self._metrics, self._answer, self._records = prompts, metrics, answer, records
        self._made: list[PromptRecord] | None = None
        self._settings = _settings(spec.evaluation)

    @property
    def metric(self) -> str:
        """The metric that decides which weights are the best."""
        return self._metrics.names[0]

    def due(self, version: int) -> bool:
        """Whether the weights after iteration `version` are still to be evaluated during PPO."""
        return self._spec.due(version) and self.wanted(version)

    def wanted(self, version: int) -> bool:
        """Whether there are prompts to answer, and these weights are not evaluated yet."""
        return bool(self._prompts()) and self._get(version) is None

    async def check(self) -> None:
        """Try what can be tried before training begins. Raises DataError and RewardError."""
        if self._prompts():
            await self._metrics.check(self._prompts())

    async def draw(self, version: int) -> None:
        """Draw the answers of `version`, which the rollouts hold, without measuring them. `run` measures them later.
        Raises what drawing them raises."""
        prompts = self._prompts()
        if prompts and self._get(version) is None:
            self._open(version)
            await self._answer(version, prompts, self._seeds(prompts), self._spec.temperature, False)

    async def run(self, version: int) -> EvaluationResult | None:
        """Evaluate the weights after iteration `version`, which the rollouts and scorers hold. A finished evaluation is
        not repeated. Returns None if there are no prompts to answer.

        Answers that are stored are not drawn again. Raises what drawing and measuring the answers raise."""
        prompts, store = self._prompts(), self._records.store
        if not prompts:
            return None
        if (known := self._get(version)) is not None:
            return known
        begun = time.monotonic()
        self._open(version)
        answers = await self._answer(
            version, prompts, self._seeds(prompts), self._spec.temperature, self._metrics.rewarded
        )
        measured = await self._metrics.measure(version, answers)
        found = EvaluationResult(version, {name: _mean(answers, values) for name, values in measured.items()})
        await asyncio.to_thread(self._write, found, answers, measured)
        store.put(_key(version), {"metrics": found.metrics, "settings": self._settings})
        if version == BEFORE_SFT:
            self._show_start(found)
        else:
            self._show(found, answers, time.monotonic() - begun)
        store.samples.forget(evaluation_slot(version))
        return found

    def found(self, through: int | None = None) -> list[EvaluationResult]:
        """The results with the present settings, ordered by version. They are of versions up to `through`, or of all
        versions if it is None."""
        stored = self._records.store.items(FOUND)
        every = [
            EvaluationResult(int(key.rpartition("/")[2]), one["metrics"])
            for key, one in stored.items()
            if self._is_mine(one)
        ]
        return [one for one in every if through is None or one.version <= through]

    def best(self, through: int | None = None) -> EvaluationResult | None:
        """The evaluated weights with the highest mean of the first metric."""
        return best_of(self.found(through), self.metric)

    def reason_to_stop(self, through: int) -> str | None:
        """One sentence that says why to stop, if the evaluations up to version `through` have brought no gain for long
        enough. Otherwise None."""
        patience, found = self._spec.stop_after_no_gain, self.found(through)
        best = best_of(found, self.metric)
        if patience is None or best is None or (count := without_gain(found, self.metric)) < patience:
            return None
        return (
            f"the last {count} evaluations have not raised {self.metric} above {best.mean(self.metric):.4g}, which it "
            f"had after iteration {best.version} (spec.evaluation.stopAfterNoGain is {patience})"
        )

    # ------------------------------------------------------------ inner parts

    def _open(self, version: int) -> None:
        """Forget stored answers of `version` that were drawn with other settings."""
        store = self._records.store
        if store.get("evaluation/open") != (mark := [version, self._settings]):
            store.samples.forget(evaluation_slot(version))
            store.put("evaluation/open", mark)

    def _prompts(self) -> list[PromptRecord]:
        if self._made is None:
            self._made = self._make_prompts()
        return self._made

    def _seeds(self, prompts: Sequence[PromptRecord]) -> list[list[int]]:
        return [
            [
                # Older releases drew one sample per prompt. The first sample keeps their seed.
                derived_seed("evaluation", self._seed, prompt.index, *([number] if number else []))
                for number in range(self._spec.samples_per_prompt)
            ]
            for prompt in prompts
        ]

    def _get(self, version: int) -> EvaluationResult | None:
        stored = self._records.store.get(_key(version))
        return EvaluationResult(version, stored["metrics"]) if stored is not None and self._is_mine(stored) else None

    def _is_mine(self, stored: Mapping[str, Any]) -> bool:
        return bool(stored["settings"] == self._settings)

    def _write(
        self, found: EvaluationResult, answers: Sequence[HeldOutAnswer], measured: Mapping[str, Sequence[float]]
    ) -> None:
        """Write the answers as text. A full disk does not stop the run."""
        if self._records.texts is None:
            return
        rows = [
            {
                "version": found.version,
                "prompt_index": answer.prompt.index,
                "sample_index": answer.sample,
                "prompt": answer.prompt.text,
                "response": answer.raw or answer.text,
                "tokens": answer.tokens,
                "finish_reason": answer.finish_reason,
                "measures": {name: values[number] for name, values in measured.items()},
                "fields": answer.prompt.fields,
            }
            for number, answer in enumerate(answers)
        ]
        with contextlib.suppress(OSError):
            self._records.texts.write_evaluation(found.version, rows)

    def _show(self, found: EvaluationResult, answers: Sequence[HeldOutAnswer], seconds: float) -> None:
        records, version = self._records, found.version
        facts = {name: dict(value) for name, value in found.metrics.items()}
        for name, value in facts.items():
            if version == 0:
                records.results.fact(f"evaluation.{name}.{BEFORE}", value)
            records.metrics.evaluation.labels(name).set(value["mean"])
        records.metrics.evaluation_iteration.set(version)
        records.results.fact("evaluation.prompts", len(self._prompts()))
        row = {name: value["mean"] for name, value in facts.items()}
        row |= {f"{name}_ci95": value["ci95"] for name, value in facts.items()}
        row |= {
            "samples": float(len(answers)),
            "response_length": sum(a.tokens for a in answers) / len(answers),
            "finished_fraction": sum(a.finish_reason == "stop" for a in answers) / len(answers),
            "seconds": seconds,
        }
        records.history.add(EVALUATION, version, row)
        status = {"iteration": version, "metric": self.metric, "metrics": facts}
        best = self.best()
        if best is not None and self._spec.every_iterations is not None:
            summary = {"iteration": best.version, "metric": self.metric, **best.metrics[self.metric]}
            records.results.fact("evaluation.best", summary)
            status["best"] = {"iteration": best.version, **best.metrics[self.metric]}
        if version == 0 and (start := self._get(BEFORE_SFT)) is not None:
            status["before_sft"] = {name: dict(value) for name, value in start.metrics.items()}
        records.progress.update(evaluation=status)
        records.log("evaluation.finished", iteration=version, seconds=round(seconds, 3), **facts)

    def _show_start(self, found: EvaluationResult) -> None:
        """Record the results of the model before SFT. They are not a point of PPO's curves."""
        facts = {name: dict(value) for name, value in found.metrics.items()}
        for name, value in facts.items():
            self._records.results.fact(f"evaluation.{name}.{BEFORE_SFT_FACT}", value)
        self._records.results.fact("evaluation.prompts", len(self._prompts()))
        self._records.log("evaluation.finished", iteration=BEFORE_SFT, **facts)

    def note_end(self, version: int) -> None:
        """Record that the run ends with these weights."""
        found = self._get(version)
        for name, value in (found.metrics if found is not None else {}).items():
            self._records.results.fact(f"evaluation.{name}.{AFTER}", dict(value))


def _key(version: int) -> str:
    return FOUND_BEFORE_SFT if version == BEFORE_SFT else f"{FOUND}/{version:09d}"


def _mean(answers: Sequence[HeldOutAnswer], values: Sequence[float]) -> dict[str, float]:
    """The mean over prompts of the mean over each prompt's answers, with its 95% interval."""
    by_prompt: dict[int, list[float]] = {}
    for answer, value in zip(answers, values, strict=True):
        by_prompt.setdefault(answer.prompt.index, []).append(value)
    return mean_ci95([sum(group) / len(group) for group in by_prompt.values()])


def _settings(spec: Evaluation) -> str:
    """A hash of the settings that decide the answers and measures."""
    document = spec.model_dump(mode="json", by_alias=True)
    kept = {name: value for name, value in document.items() if name not in _WHEN}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
