"""The rewards of one iteration. A function is called as soon as its samples are finished, while other samples are
generated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.text.texts import ResponseText
from dovetail.coordinator.rewards.calls import Call, Calls, field_names, fields_of
from dovetail.coordinator.samples.model_sets import InferenceOfSets
from dovetail.coordinator.samples.scoring import Finished, Inference, Scores
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Key, SampleTable, ScoreRow
from dovetail.protocol.messages import Span
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.process.process_names import COORDINATOR


@dataclass(frozen=True)
class RewardFunctions:
    """The reward functions of a job. `text` decodes a response. `calls` must be open. `told` has the fields that a
    sample adds to those of its prompt."""

    calls: Calls
    samples: SampleTable
    text: Callable[[Finished], Awaitable[ResponseText]]
    told: Callable[[Key], dict[str, Any]] = lambda _: {}


class Rewards:
    """The reward functions of one iteration. It is an async context manager. Outside of it nothing is called. Each
    result is stored at once, and a stored result is not requested again. So results do not depend on the timing of
    samples or on the number of workers.

    `on_scores` gets the samples' weighted sums, those of a call at once. `check` and `finish` raise what it raised."""

    def __init__(
        self,
        functions: RewardFunctions,
        iteration: int,
        records: Sequence[PromptRecord],
        samples_per_prompt: int,
        on_scores: Callable[[Mapping[Key, float]], None],
        on_span: Callable[[Span], None] = lambda _: None,
    ) -> None:
        self._iteration = iteration
        self._calls, self._samples, self._text = functions.calls, functions.samples, functions.text
        self._told = functions.told
        self._records, self._fields = records, field_names(records)
        self._per_prompt = samples_per_prompt
        self._on_scores, self._on_span = on_scores, on_span
        self._known = self._samples.rewards(iteration)
        self._responses: dict[Key, asyncio.Future[ResponseText]] = {}
        self._groups: dict[int, list[Key]] = {}
        self._left = 0
        self._done = asyncio.Event()
        self._done.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None

    async def __aenter__(self) -> Rewards:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancel([*self._tasks, *self._responses.values()])

    def add(self, finished: Iterable[Finished]) -> None:
        """Add samples to be rewarded."""
        known = []
        for sample in finished:
            key = sample.key
            if not self._whole(key):
                self._responses[key] = asyncio.ensure_future(self._text(sample))
            group = self._groups.setdefault(key.prompt, [])
            group.append(key)
            self._left += 1
            if self._error is None:
                self._done.clear()
            for number, function in enumerate(self._calls.functions):
                if function.needs == "Sample":
                    self._ask(number, [key])
                elif len(group) == self._per_prompt:
                    self._ask(number, sorted(group))
            if self._whole(key):
                known.append(key)
        self._settle(known)

    def check(self) -> None:
        """Raise what a call or `on_score` has raised."""
        if self._error is not None:
            raise self._error

    async def finish(self) -> None:
        """Wait until all added samples have their scores. Each call has its own deadline. Raises what `check`
        raises."""
        await self._done.wait()
        self.check()

    def _whole(self, key: Key) -> bool:
        return all(function.title in self._known.get(key, {}) for function in self._calls.functions)

    def _ask(self, number: int, keys: list[Key]) -> None:
        title = self._calls.functions[number].title
        if all(title in self._known.get(key, {}) for key in keys):
            return
        task = asyncio.create_task(self._call(number, keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, number: int, keys: list[Key]) -> None:
        function = self._calls.functions[number]
        record = self._records[keys[0].prompt]
        try:
            said = [await self._responses[key] for key in keys]
            told = [self._told(key) for key in keys]
            call = Call(
                self._iteration,
                keys[0].prompt,
                [record.text] * len(keys),
                [each.text for each in said],
                fields_of(self._fields, [record] * len(keys))
                | {name: [each[name] for each in told] for name in told[0]},
                keys[0].sample if len(keys) == 1 and self._per_prompt > 1 else None,
                [each.raw for each in said],
            )
            answer = await self._calls.rewards(number, call)
            steps = None if answer.steps is None else dict(zip(keys, answer.steps, strict=True))
            self._samples.add_rewards(function.title, dict(zip(keys, answer.rewards, strict=True)), steps)
            args = {"function": function.title, "prompt": call.prompt, "n": len(keys)}
            self._on_span(
                Span(
                    name="reward function",
                    process=COORDINATOR,
                    lane="reward",
                    start=answer.started,
                    end=answer.ended,
                    args=args,
                )
            )
            for key, reward in zip(keys, answer.rewards, strict=True):
                self._known.setdefault(key, {})[function.title] = reward
            self._settle([key for key in keys if self._whole(key)])
        except Exception as error:
            self._error = self._error or error
            self._done.set()

    def _settle(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        functions = self._calls.functions
        self._on_scores({key: math.fsum(f.weight * self._known[key][f.title] for f in functions) for key in keys})
        self._left -= len(keys)
        if not self._left:
            self._done.set()


class Joined:
    """Stores a sample as scored when both its scores from the scorers and its reward have arrived, in any order."""

    def __init__(self, samples: SampleTable, critic_version: int) -> None:
        self._samples = samples
        self._version = critic_version
        self._scores: dict[Key, Scores] = {}
        self._rewards: dict[Key, float] = {}

    def scores(self, scores: list[Scores]) -> None:
        self._scores.update((s.key, s) for s in scores)
        self._store(s.key for s in scores)

    def rewards(self, rewards: Mapping[Key, float]) -> None:
        self._rewards.update(rewards)
        self._store(rewards)

    def _store(self, keys: Iterable[Key]) -> None:
        both = [key for key in keys if key in self._scores and key in self._rewards]
        if not both:
            return
        rows = [(self._scores.pop(key), self._rewards.pop(key)) for key in both]
        self._samples.score(ScoreRow(s.key, s.ref_logprobs, s.values, r, self._version) for s, r in rows)


class WithRewards:
    """Runs inference and reward functions together, with the interface of `Inference`."""

    def __init__(self, inference: Inference | InferenceOfSets, rewards: Rewards) -> None:
        self._inference = inference
        self._rewards = rewards

    async def __aenter__(self) -> WithRewards:
        await self._rewards.__aenter__()
        await self._inference.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._inference.__aexit__(kind, error, trace)
        await self._rewards.__aexit__(kind, error, trace)

    def add(self, samples: Iterable[Finished]) -> None:
        """Add samples to be scored."""
        new = list(samples)
        self._inference.add(new)
        self._rewards.add(new)

    def follow(self, left: int, growing: Callable[[], Sequence[Growing]]) -> None:
        """Let scorers compute parts of samples that are still generated."""
        self._inference.follow(left, growing)

    def poke(self) -> None:
        """Ask again which scorers are free."""
        self._inference.poke()

    def check(self) -> None:
        """Raise what the handling of scores has raised."""
        self._inference.check()
        self._rewards.check()

    async def finish(self, deadline_seconds: float) -> None:
        """Wait until all added samples are scored. The deadline applies to inference. Raises what `check` raises, and
        TimeoutError."""
        parts = [
            asyncio.create_task(self._rewards.finish()),
            asyncio.create_task(self._inference.finish(deadline_seconds)),
        ]
        try:
            await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
