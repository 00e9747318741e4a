"""Measures an evaluation's answers with rewards, exact matches, and the user's own functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.coordinator.data import synthetic
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.rewards.calls import Call, Calls, Function, evaluation_slot, field_names, fields_of
from dovetail.coordinator.rewards.workers import Workers
from dovetail.manifest.types import RewardFunction, RLHFJobSpec, metric_name

REWARD, EXACT_MATCH, QUALITY = "reward", "exactMatch", "quality"
# The user's functions are called with this answer before training, to find errors early.
REHEARSED = "Yes, of course."
REHEARSED_PROMPTS = 2


@dataclass(frozen=True)
class HeldOutAnswer:
    """One answer to an evaluation prompt. `tokens` is the number of its tokens. `reward` is None if no rewards were
    requested. `raw` is the text with the tokens that end it."""

    prompt: PromptRecord
    sample: int
    text: str
    tokens: int
    finish_reason: str | None
    reward: float | None = None
    raw: str = ""


class EvaluationMetrics:
    """The metrics of an evaluation. The user's functions are imported from `folder`, unless
    spec.models.reward.importPath names another folder."""

    def __init__(self, spec: RLHFJobSpec, folder: Path, log: Callable[..., None]) -> None:
        self._spec = spec.evaluation
        prompts = spec.evaluation.prompts or spec.data.prompts
        language = bool(prompts) and all(source.synthetic is not None for source in prompts)
        named = [metric_name(metric) for metric in spec.evaluation.metrics]
        self._language = language and QUALITY not in named
        # The first metric decides which weights are the best.
        self.names = [*named, *([QUALITY] if self._language else [])]
        self._calls: Calls | None = None
        if functions := spec.evaluation.functions:
            places = [f"spec.evaluation.metrics[{spec.evaluation.metrics.index(name)}]" for name in functions]
            model = spec.models.reward.model_copy(
                update={"function": None, "functions": [RewardFunction(function=name) for name in functions]}
            )
            self._calls = Calls(Workers(model, folder, places), spec.failure_policy.reward_retries, log)

    @property
    def rewarded(self) -> bool:
        """Whether the answers need rewards."""
        return REWARD in self.names

    async def check(self, prompts: Sequence[PromptRecord]) -> None:
        """Check that the prompts have right answers, and try the user's functions on two prompts. Raises DataError and
        RewardError."""
        field = self._spec.answer_field
        if EXACT_MATCH in self.names:
            for prompt in prompts:
                if prompt.fields.get(field) is None:
                    raise DataError(
                        f"spec.evaluation.metrics has exactMatch, but the record of evaluated prompt {prompt.index} "
                        f"has no field {field!r} with the right answer; name the field in spec.evaluation.answerField"
                    )
        if self._calls is not None:
            names = field_names(prompts)
            for number in range(len(await self._open(self._calls))):
                for prompt in prompts[:REHEARSED_PROMPTS]:
                    answer = HeldOutAnswer(prompt, 0, REHEARSED, 0, None)
                    call = _call(0, [answer] * self._spec.samples_per_prompt, names)
                    await self._calls.rewards(number, call, rehearsal=True)

    async def measure(self, version: int, answers: Sequence[HeldOutAnswer]) -> dict[str, list[float]]:
        """The value of each metric for each answer. The answers to one prompt must follow each other. Raises
        RewardError."""
        found: dict[str, list[float]] = {}
        if self.rewarded:
            found[REWARD] = [float(answer.reward or 0.0) for answer in answers]
        if EXACT_MATCH in self.names:
            found[EXACT_MATCH] = [
                float(is_match(answer.text, answer.prompt.fields.get(self._spec.answer_field))) for answer in answers
            ]
        if self._language:
            qualities = synthetic.qualities([a.prompt.text for a in answers], [a.text for a in answers])
            found[QUALITY] = [float(value) for value in qualities]
        if self._calls is not None:
            groups: dict[int, list[HeldOutAnswer]] = {}
            for answer in answers:
                groups.setdefault(answer.prompt.index, []).append(answer)
            names = field_names([group[0].prompt for group in groups.values()])
            for number, function in enumerate(await self._open(self._calls)):
                calls = [self._calls.rewards(number, _call(version, group, names)) for group in groups.values()]
                found[function.title] = [value for one in await asyncio.gather(*calls) for value in one.rewards]
        return {name: found[name] for name in self.names}

    async def close(self) -> None:
        """End the worker processes of the user's functions."""
        if self._calls is not None:
            await self._calls.close()

    @staticmethod
    async def _open(calls: Calls) -> list[Function]:
        if not calls.functions:
            calls.functions = [replace(function, what="metric") for function in await calls.open()]
        return calls.functions


def _call(version: int, answers: Sequence[HeldOutAnswer], names: Sequence[str]) -> Call:
    """The call for all answers to one prompt, with the fields `names`. An iteration below 1 stands for an evaluation
    (see `Call`)."""
    prompt, texts = answers[0].prompt, [answer.text for answer in answers]
    fields, raw = fields_of(names, [prompt] * len(texts)), [answer.raw or answer.text for answer in answers]
    return Call(evaluation_slot(version), prompt.index, [prompt.text] * len(texts), texts, fields, raw=raw)


def is_match(text: str, right: object) -> bool:
    """Whether an answer equals the right text, or one of a list of right texts. White space around the texts is
    ignored."""
    choices = right if isinstance(right, list) else [right]
    return any(text.strip() == str(choice).strip() for choice in choices)
