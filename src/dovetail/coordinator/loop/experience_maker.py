"""Makes the experience of an iteration. It draws samples on the rollouts, lets scorers and reward functions score them,
and builds the arrays to train on.

With DAPO's dynamic sampling, prompts whose samples all have the same reward are replaced by others, for some rounds at
most. The choice depends only on the manifest and on rewards. A decision and its new samples are stored together,
so a restarted coordinator continues with the same prompts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.prepare import GivenPrompt, Prepared, PromptRecord
from dovetail.coordinator.data.text.texts import Texts
from dovetail.coordinator.job import Job
from dovetail.coordinator.rewards.calls import Calls, evaluation_slot
from dovetail.coordinator.samples.device_sharing import Devices
from dovetail.coordinator.samples.evaluation_metrics import HeldOutAnswer
from dovetail.coordinator.samples.fusion.account import account, record
from dovetail.coordinator.samples.fusion.fused_stage import FusedStage
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.lineup import Turn
from dovetail.coordinator.samples.score import INFERENCE_SECONDS, Score
from dovetail.coordinator.samples.scoring import Scorer
from dovetail.coordinator.samples.session_drawing import Episodes
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.episodes import episode_facts
from dovetail.coordinator.store.experience_files import episode_arrays, experience_arrays
from dovetail.coordinator.store.samples import NewSample, Sample, State
from dovetail.coordinator.store.step_rewards import step_arrays
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.weights import Weights
from dovetail.protocol.experience import Experience
from dovetail.protocol.messages import Span
from dovetail.protocol.sampling import asked_of_servers, sample_seed
from dovetail.protocol.wire import SampleArrays

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


def _together(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The facts of an iteration from those of its rounds. Seconds and numbers of samples are added up. The other facts
    are those of the last round."""
    found = dict(rounds[-1])
    for name in ("fusion_migrated", "fusion_hidden_seconds", "fusion_saved_seconds", "fusion_stage_seconds"):
        found[name] = sum(facts[name] for facts in rounds)
    return found


class ExperienceAssembly:
    """Puts together an iteration's experience from the samples in the store. Thousands of long samples take seconds, so
    call its methods in a thread.

    `pad` is the token that fills short rows. `calls` has the job's reward functions. It is None if a reward model gives
    the rewards. `compares` says whether the advantage compares the samples of one prompt."""

    def __init__(self, store: Store, texts: Texts, pad: int, calls: Calls | None, compares: bool) -> None:
        self._samples, self._episodes, self._compares = store.samples, store.episodes, compares
        self._texts, self._pad, self._calls = texts, pad, calls

    def arrays_of(self, iteration: int, samples: Sequence[Sample]) -> SampleArrays:
        """The arrays of some of an iteration's samples, which are scored."""
        experts = self._samples.experts(iteration, sorted({s.key.prompt for s in samples}))
        arrays = experience_arrays(samples, self._pad, experts)
        arrays |= episode_arrays(samples, self._episodes.of(iteration), self._compares)
        if self._calls is not None:
            weights = {function.title: function.weight for function in self._calls.functions}
            arrays |= step_arrays(samples, self._samples.steps(iteration), weights, self._text)
        return arrays

    def experience(self, iteration: int, version: int, prompts: Sequence[PromptRecord]) -> Experience:
        """The experience of an iteration whose samples are all scored. `version` is the version of the weights that
        must have drawn them. `prompts` has the prompts by position. Raises StoreError."""
        samples = self._samples.experience(iteration)
        for held in (v for s in samples for v in (s.first_version, s.weight_version)):
            if held is not None and held != version:
                raise StoreError(f"samples of iteration {iteration} are of weight version {held}, not {version}")
        said = [self._texts.of(s.tokens) for s in samples]
        return Experience(
            iteration=iteration,
            prompts=[prompts[s.key.prompt].text for s in samples],
            responses=[each.text for each in said],
            arrays=self.arrays_of(iteration, samples),
            fields=[s.fields for s in samples],
            raw=[each.raw for each in said],
        )

    def _text(self, tokens: NDArray[np.int32]) -> str:
        return self._texts.of(tokens).text


class ExperienceMaker:
    """Draws and scores the samples of the PPO stage. All state is in the store. `facts` has for each iteration the
    metrics of inter-stage fusion and of each reward function. The caller removes them."""

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        weights: Weights,
        generator: Generator | Episodes,
        score: Score,
        devices: Devices,
    ) -> None:
        self._spec, self._records, self._prepared = job.spec, job.records, prepared
        self._weights, self._generator, self._score, self._devices = weights, generator, score, devices
        self._samples = job.store.samples
        self._assembly = ExperienceAssembly(
            job.store, score.texts, prepared.pad_token_id, score.calls, job.spec.ppo.compares_samples
        )
        self.facts: dict[int, dict[str, float]] = {}

    def discard(self, iteration: int) -> None:
        """Drop the iteration's samples and the facts of its step. Others are generated when the run goes on."""
        self._records.store.forget(iteration, [replaced_key(iteration), f"ppo/{iteration}/facts"])

    async def rest(self) -> None:
        """Call it before training. Rollouts that share GPUs with trainers leave these to them."""
        await self._devices.rest()

    # ------------------------------------------------------------ the iteration

    def begin(self, iteration: int, given: Sequence[GivenPrompt] | None = None) -> IterationPrompts:
        """Store the iteration's new samples, unless they are stored. Their prompts are `given`, or the job's own if it
        is None."""
        prepared, ppo = self._prepared, self._spec.ppo
        prompts = IterationPrompts(
            iteration,
            prepared.prompts(iteration) if given is None else prepared.given_prompts(given),
            self._records.store,
            lambda position, prompt: self._samples_of(iteration, position, prompt),
            ppo.dynamic_sampling,
            None
            if given is not None
            else lambda number, count, known: prepared.further_prompts(iteration, number, count, known),
        )
        self._samples.begin_iteration(iteration, prompts.samples())
        return prompts

    def open(self, iteration: int) -> AbstractContextManager[Turn]:
        """Open an iteration that has begun, with the weights that belong to it."""
        return self._generator.open(iteration, self._spec.ppo.weight_version(iteration))

    async def draw(self, turn: Turn, prompts: IterationPrompts) -> None:
        """Draw and score the iteration's samples. Results that the store already holds are not computed again. With
        `ppo.dynamicSampling`, prompts whose samples all have the same reward are replaced and drawn in further rounds.
        Raises GenerationError, RewardError, StoreError or TimeoutError."""
        rounds = [await self._round(turn, prompts)]
        while prompts.replace_equal():
            told = {"round": prompts.round, "prompts": prompts.replaced, "of": len(prompts.current)}
            self._records.log("prompts.replaced", iteration=turn.iteration, **told)
            rounds.append(await self._round(turn, prompts))
        self.facts[turn.iteration] = _together(rounds)
        if self._spec.ppo.dynamic_sampling:
            counts = {"sampling_rounds": 1.0 + prompts.round, "prompts_replaced": float(prompts.replaced)}
            self.facts[turn.iteration] |= counts

    async def _round(self, turn: Turn, prompts: IterationPrompts) -> dict[str, float]:
        """Generate and score those of the iteration's samples that the store lacks. Returns the round's facts."""
        iteration, records, devices, generator = turn.iteration, self._records, self._devices, self._generator
        timeline, scoring = records.timeline, list[Span]()
        await self._score.open()
        begun = time.time()
        before = sum(n for state, n in self._samples.counts(iteration).items() if state is not State.PENDING)

        def progress(done: int, left: int) -> None:
            if turn.first:
                records.progress.update(samples_done=before + done, samples_total=turn.total)
                records.metrics.samples_left.set(left - done)
            devices.give_way(left - done, fusion, generator)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            if turn.alone:  # else the status shows the phase of the trainers
                records.progress.update(phase=name)
            with timeline.phase(name, iteration, turn.lane):
                yield

        def allowed(scorer: Scorer) -> bool:
            return turn.first and devices.may_score(scorer, fusion, generator)

        def scored(span: Span) -> None:
            scoring.append(span)
            timeline.add([span])

        lengths = [len(prompts.records[p].token_ids) for p in prompts.newest]
        lengths = [length for length in lengths for _ in range(self._spec.ppo.samples_per_prompt)]
        earlier = timeline.of(iteration).get("generation", 0.0)
        async with (
            devices.stage(iteration, lengths) as fusion,
            self._score.of(iteration, prompts.records, allowed, scored) as inference,
        ):
            stage = FusedStage(turn, self._samples, generator, inference, fusion, progress)
            done = await stage.run(INFERENCE_SECONDS, phase)
        generated = begun + timeline.of(iteration)["generation"] - earlier
        records.metrics.samples.inc(done.samples)
        records.metrics.tokens.inc(done.tokens)
        timeline.add(done.spans)
        scorers = len(devices.fleet.instances("scorer"))
        found = account(begun, generated, time.time(), done.spans, scoring, scorers)
        facts = record(records, self._spec.plan.inter_stage_fusion, turn, fusion, done, found)
        facts |= self._reward_means(iteration)
        facts |= episode_facts(self._records.store.episodes.of(iteration), self._spec.ppo.compares_samples)
        devices.learn(done, scoring, self._samples.lengths(iteration))
        return facts

    async def experience(self, prompts: IterationPrompts) -> Experience:
        """The iteration's experience. All its samples are scored. Raises StoreError."""
        iteration = prompts.iteration
        version = self._spec.ppo.weight_version(iteration)
        made = await asyncio.to_thread(self._assembly.experience, iteration, version, prompts.records)
        if self._spec.ppo.ptx_coef > 0:
            made.arrays.update(self._prepared.ptx_batch(iteration))
        return made

    def _samples_of(self, iteration: int, position: int, record: PromptRecord) -> list[NewSample]:
        tokens, seed = np.asarray(record.token_ids, np.int32), self._spec.seed
        return [
            NewSample(position, s, tokens, sample_seed(seed, iteration, position, s), record.fields)
            for s in range(self._spec.ppo.samples_per_prompt)
        ]

    def _reward_means(self, iteration: int) -> dict[str, float]:
        """The metric reward/<name> of each reward function. It is the mean over the iteration's samples, before the
        function's weight is applied."""
        by_function: dict[str, list[float]] = {}
        for given in self._samples.rewards(iteration).values():
            for title, reward in given.items():
                by_function.setdefault(title, []).append(reward)
        means = {title: math.fsum(rewards) / len(rewards) for title, rewards in sorted(by_function.items())}
        for title, mean in means.items():
            self._records.metrics.reward_functions.labels(title).set(mean)
        return {f"reward/{title}": mean for title, mean in means.items()}

    # ------------------------------------------------------------ evaluations

    async def answer(
        self,
        version: int,
        records: Sequence[PromptRecord],
        seeds: Sequence[Sequence[int]],
        temperature: float | None,
        rewarded: bool,
    ) -> list[HeldOutAnswer]:
        """The answers to evaluation prompts, drawn with the weights `version`. They are not trained on. `seeds` has the
        seeds of each prompt's samples. If `temperature` is None, the job's own is used. `rewarded` says whether the
        answers get rewards. The result is ordered by prompt and sample.

        Answers that the store already holds are not drawn again. Raises StoreError if an answer was drawn with another
        version, and what generation and inference raise."""
        slot = evaluation_slot(version)
        self._samples.begin_iteration(
            slot,
            [
                NewSample(r.index, number, np.asarray(r.token_ids, np.int32), seed, r.fields)
                for r, of_prompt in zip(records, seeds, strict=True)
                for number, seed in enumerate(of_prompt)
            ],
        )
        if self._samples.counts(slot).get(State.PENDING):
            with self._generator.open(slot, version) as turn:
                await self._weights.reach(turn)
                await self._generator.generate(turn, generation=asked_of_servers(self._spec, temperature))
        if rewarded:
            await self._score.answers(version, records, len(seeds[0]))
        found = self._samples.samples(slot)
        for held in (v for s in found for v in (s.first_version, s.weight_version)):
            # An episode whose environment fails at its beginning has no version.
            if held is not None and held != version:
                raise StoreError(f"answers of weight version {version} were drawn with version {held}")
        by_index = {record.index: record for record in records}
        texts = await asyncio.to_thread(lambda: [self._score.texts.of(s.tokens) for s in found])
        return [
            HeldOutAnswer(by_index[s.key.prompt], s.key.sample, text, len(s.tokens), s.finish_reason, s.reward, raw)
            for s, (text, raw) in zip(found, texts, strict=True)
        ]
