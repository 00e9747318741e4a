"""Scores the samples of an iteration, or the answers of an evaluation, with scorers and reward functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.coordinator.data.prepare import Prepared, PromptRecord
from dovetail.coordinator.data.text.texts import Texts
from dovetail.coordinator.job import Job
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT
from dovetail.coordinator.rewards.calls import Calls, evaluation_slot
from dovetail.coordinator.samples.model_sets import InferenceOfSets, ModelSet
from dovetail.coordinator.samples.reward_stage import Joined, RewardFunctions, Rewards, WithRewards
from dovetail.coordinator.samples.scorers import REWARD_MODEL, Scorers
from dovetail.coordinator.samples.scoring import Finished, Inference, Scorer, Scores
from dovetail.coordinator.store.episodes import BranchPlace
from dovetail.coordinator.store.samples import Key, ScoreRow, State
from dovetail.protocol.messages import Span

# Inference fails after this time without a scored sample.
INFERENCE_SECONDS = 900.0


class Score:
    """What scores the job's samples. `calls` has the reward functions, which replace a reward model. `texts` decodes
    responses. Scores are stored as they come."""

    def __init__(self, job: Job, prepared: Prepared, scorers: Scorers, calls: Calls | None) -> None:
        self._job, self._prepared, self.calls = job, prepared, calls
        self._scorers, self._samples = scorers, job.store.samples
        self.texts = Texts(prepared.tokenizer, prepared.actor_config_dir)
        self._functions: RewardFunctions | None = None
        episodes = None if job.spec.sessions is None else job.store.episodes
        self._branches: Callable[[Key], Sequence[BranchPlace]]
        self._branches = (lambda _: ()) if episodes is None else episodes.branches
        if calls is not None:
            self._functions = RewardFunctions(
                calls,
                self._samples,
                lambda sample: self.texts.later(sample.response),
                (lambda _: {}) if job.spec.sessions is None else self._episode,
            )

    async def close(self) -> None:
        self.texts.close()
        await self._scorers.close()

    def _episode(self, key: Key) -> dict[str, Any]:
        """What reward functions are told of a sample's episode."""
        found = self._job.store.episodes.get(key)
        assert found is not None, "its episode has ended"
        return {"messages": found.messages, "earned": found.reward, "ending": found.ending}

    async def open(self) -> None:
        """Call it before each iteration and evaluation. Raises RewardError."""
        if self.calls is not None:
            await self.calls.open()

    def of(
        self,
        iteration: int,
        prompts: Sequence[PromptRecord],
        allowed: Callable[[Scorer], bool],
        on_span: Callable[[Span], None],
    ) -> InferenceOfSets | WithRewards:
        """Inference that stores the scores of finished samples. With reward functions, a sample is stored when its
        reward is known too. Scorers may take samples while they are `allowed`. `on_span` gets the span of each
        batch."""
        ppo = self._job.spec.ppo
        version = ppo.weight_version(iteration)

        def keep(scores: list[Scores]) -> None:
            self._samples.score(ScoreRow(s.key, s.ref_logprobs, s.values, s.score, version) for s in scores)

        def told(span: Span) -> None:
            on_span(span.model_copy(update={"iteration": iteration}))

        def inference_of(models: ModelSet, collect: Callable[[list[Scores]], None]) -> Inference:
            return Inference(self._scorers.pool(models, version, allowed), models, collect, told)

        if self._functions is None:
            return InferenceOfSets(self._scorers.model_sets, inference_of, keep)
        joined, timeline = Joined(self._samples, version), self._job.records.timeline
        rewards = Rewards(
            self._functions,
            iteration,
            prompts,
            ppo.samples_per_prompt,
            joined.rewards,
            lambda span: timeline.add([span]),
        )
        of_sets = InferenceOfSets(self._scorers.model_sets, inference_of, joined.scores, self._branches)
        return WithRewards(of_sets, rewards)

    async def answers(self, version: int, records: Sequence[PromptRecord], samples_per_prompt: int) -> None:
        """Store the rewards of the evaluation's answers, drawn with the weights `version`. The job's reward functions
        or its reward model give them. The scorers hold version 0 when the answers of BEFORE_SFT get theirs."""
        slot = evaluation_slot(version)
        finished = [Finished(s.key, s.prompt_tokens, s.tokens) for s in self._samples.samples(slot, State.GENERATED)]
        await self.open()

        def keep(rewards: Mapping[Key, float | None]) -> None:
            self._samples.score(ScoreRow(key, None, None, reward) for key, reward in rewards.items())

        if self._functions is not None:
            prompts = self._prepared.for_rewards(records)
            async with Rewards(self._functions, slot, prompts, samples_per_prompt, keep) as rewards:
                rewards.add(finished)
                await rewards.finish()
            return
        models = next(models for models in self._scorers.model_sets if REWARD_MODEL in models)

        def collect(scores: list[Scores]) -> None:
            keep({one.key: one.score for one in scores})

        pool = self._scorers.pool(models, 0 if version == BEFORE_SFT else version, lambda _: True)
        async with Inference(pool, (REWARD_MODEL,), collect) as inference:
            inference.add(finished)
            await inference.finish(INFERENCE_SECONDS)
