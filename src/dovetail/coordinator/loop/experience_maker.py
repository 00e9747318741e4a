"""From prompts to experience: generation on the rollouts, inference on the scorers, one iteration's arrays."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.seeds import sample_seed
from dovetail.coordinator.fusion.fusion import Fusion, StageFusion, rollout_of
from dovetail.coordinator.fusion.sleep import Sleepers
from dovetail.coordinator.fusion.stage import generate_and_score
from dovetail.coordinator.generation.generation import KIND as ROLLOUT
from dovetail.coordinator.generation.generation import Generator
from dovetail.coordinator.generation.work import Settings
from dovetail.coordinator.loop.experience import Experience, experience_arrays
from dovetail.coordinator.loop.record import record
from dovetail.coordinator.rewards.calls import Calls
from dovetail.coordinator.rewards.stage import Joined, Rewards, WithRewards
from dovetail.coordinator.scoring.lanes import Lane, Lanes, lanes_of
from dovetail.coordinator.scoring.scoring import Inference, Scorer, Scores, load_models
from dovetail.coordinator.store.samples import NewSample, ScoreRow, State
from dovetail.coordinator.weights.publishing import Target
from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import RLHFJobSpec, Role

if TYPE_CHECKING:
    from dovetail.coordinator.loop.engines import Engines

LOAD_SECONDS = 600.0
# Without a single scored sample.
INFERENCE_SECONDS = 900.0


class ExperienceMaker:
    """Owns generation and inference of the PPO stage; state lives in the store. `calls`: the reward functions, in place
    of a reward model. `facts`: the last iteration's metrics of inter-stage fusion and of each reward function."""

    def __init__(self, engines: Engines, calls: Calls | None) -> None:
        self._engines = engines
        self._spec: RLHFJobSpec = engines.spec
        self._samples = engines.store.samples
        self._calls = calls
        self._loaded: dict[str, str] = {}
        self._colocated = {g.name for g in self._spec.groups if {Role.TRAINER, Role.ROLLOUT} <= set(g.roles)}
        self._want = ["reference"]
        if calls is None:
            self._want.append("reward")
        if has_critic(self._spec):
            self._want.append("critic")
        self._plan_holds: dict[str, Sequence[str]] = {r.name: r.scores for r in engines.plan.rollouts}
        self._lanes = lanes_of(self._want, list(self._plan_holds.values())) if self._plan_holds else []
        self.facts: dict[str, float] = {}
        self._waking: asyncio.Task[None] | None = None
        self._sleepers = Sleepers(engines.fleet, lambda: engines.http, engines.log, self._swapped)
        self._fusion = Fusion(self._spec, engines.store, engines.log)
        self._generator = Generator(
            engines.store,
            engines.fleet,
            self._spec.generation,
            engines.settings.token,
            engines.log,
            Settings(wait=engines.start_seconds),
            decode=lambda tokens: str(engines.prepared.tokenizer.decode(tokens, skip_special_tokens=False)),
        )

    async def close(self) -> None:
        self._sleepers.close()
        await self._generator.close()

    async def rest(self) -> None:
        """Before training: the rollouts of groups that also train leave their GPUs to the trainers, until they take
        the new weights."""
        rollouts = self._engines.fleet.instances(ROLLOUT)
        await self._sleepers.rest([i.name for i in rollouts if i.ready and i.group in self._colocated])

    def in_batch(self, iteration: int) -> None:
        """The iteration's samples are what the next step trains on."""
        self._samples.advance(iteration, State.IN_BATCH)

    def trained(self, iteration: int) -> None:
        """The step is done."""
        self._samples.advance(iteration, State.TRAINED)

    def discard(self, iteration: int) -> None:
        """Nothing is learnt from the iteration's samples: others are generated when the run goes on."""
        self._samples.forget(iteration)

    # ------------------------------------------------------------ scorers

    def _holds(self, scorer: str) -> list[str]:
        """The models that a scorer serves: as the plan says, or all where it does not know it (a surplus rollout)."""
        return [model for model in self._want if model in self._plan_holds.get(rollout_of(scorer), self._want)]

    async def prepare_instance(self, target: Target) -> None:
        """Before an instance takes weights: a rollout must be awake, a scorer must hold the models. Raises OSError or
        TimeoutError."""
        if target.kind == "rollout":
            await self._sleepers.wake(target.name)
        if target.kind != "scorer" or self._loaded.get(target.name) == target.incarnation:
            return
        sources = self._engines.sources
        makers = {"reference": sources.reference, "reward": sources.reward_for_ppo, "critic": sources.critic}
        models = {model: makers[model]() for model in self._holds(target.name)}
        try:
            await load_models(self._engines.http, Scorer(target.name, target.url), models, LOAD_SECONDS)
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
        self._loaded[target.name] = target.incarnation

    async def hold(self) -> None:
        """Background: scorers that need no weight version still need their models, once PPO has begun. Until then the
        rollouts beside trainers rest."""
        fleet = self._engines.fleet
        while True:
            if self._engines.sync.version is None:
                await self.rest()
            for instance in fleet.eligible("scorer") if self._engines.sync.version is not None else []:
                if self._loaded.get(instance.name) != instance.incarnation:
                    target = Target(instance.name, "scorer", instance.url, instance.incarnation)
                    try:
                        await self.prepare_instance(target)
                    except (OSError, TimeoutError) as error:
                        fleet.failed(instance.name, f"could not load its models: {error}")
            await asyncio.sleep(0.5)

    def _scorers(self, lane: Lane) -> list[Scorer]:
        return [
            Scorer(i.name, i.url, i.incarnation)
            for i in self._engines.fleet.eligible("scorer")
            if self._loaded.get(i.name) == i.incarnation and set(lane) <= set(self._holds(i.name))
        ]

    # ------------------------------------------------------------ the iteration

    async def make(self, iteration: int, prompts: Sequence[PromptRecord]) -> Experience:
        """Generate and score; what the store already holds of the iteration is not done again."""
        engines = self._engines
        self._samples.begin_iteration(iteration, self._new_samples(iteration, prompts))
        total = len(prompts) * self._spec.ppo.samples_per_prompt
        engines.progress.update(samples_done=0, samples_total=total, phase="generation")
        if self._calls is not None:
            await self._calls.open()
        begun = time.time()
        before = sum(n for state, n in self._samples.counts(iteration).items() if state is not State.PENDING)

        def progress(done: int, left: int) -> None:
            engines.progress.update(samples_done=before + done)
            engines.metrics.samples_left.set(left - done)
            waking = self._waking is not None and not self._waking.done()
            if done < left and not waking and not engines.fleet.has_current(ROLLOUT):
                # Nobody else is left to generate.
                self._waking = asyncio.create_task(self._sleepers.wake_all())
            elif fusion.destinations:
                self._sleepers.expect(fusion.freed)
                self._sleepers.free(name for name in fusion.freed if self._generator.idle(name))

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            engines.progress.update(phase=name)
            with engines.timeline.phase(name):
                yield

        lengths = [len(p.token_ids) for p in prompts for _ in range(self._spec.ppo.samples_per_prompt)]
        rollouts = engines.fleet.eligible(ROLLOUT)
        async with (
            self._fusion.stage(iteration, lengths, rollouts) as fusion,
            self._inference(iteration, prompts, fusion) as inference,
        ):
            done = await generate_and_score(
                iteration, self._samples, self._generator, inference, fusion, INFERENCE_SECONDS, phase, progress
            )
        generated = begun + engines.timeline.phases["generation"]
        engines.metrics.samples.inc(done.samples)
        engines.metrics.tokens.inc(done.tokens)
        engines.timeline.add(done.spans)
        self.facts = record(engines, iteration, fusion, done, begun, generated) | self._reward_means(iteration)
        groups = {i.name: i.group for i in engines.fleet.instances()}
        # A sample that goes through several lanes is one sample.
        scoring = [
            s.model_copy(update={"args": {**s.args, "tokens": s.args["tokens"] // len(self._lanes)}})
            for s in engines.timeline.spans("inference")
            if "tokens" in s.args
        ]
        self._fusion.learn(groups, done, scoring)
        self._fusion.end([len(s.tokens) for s in self._samples.samples(iteration)])
        return self._experience(iteration, prompts)

    async def answer(self, slot: int, records: Sequence[PromptRecord], seeds: Sequence[int]) -> list[str]:
        """One response to each prompt, neither scored nor trained on, kept as iteration `slot`, below 0.

        What the store already holds of them is not generated again."""
        pairs = zip(records, seeds, strict=True)
        self._samples.begin_iteration(
            slot, [NewSample(r.index, 0, np.asarray(r.token_ids, np.int32), seed) for r, seed in pairs]
        )
        await self._generator.generate(slot)
        return [self._text(s.tokens) for s in self._samples.samples(slot)]

    def _new_samples(self, iteration: int, prompts: Sequence[PromptRecord]) -> list[NewSample]:
        return [
            NewSample(
                p,
                s,
                np.asarray(record.token_ids, np.int32),
                sample_seed(self._spec.seed, iteration, p, s),
                record.fields,
            )
            for p, record in enumerate(prompts)
            for s in range(self._spec.ppo.samples_per_prompt)
        ]

    def _inference(self, iteration: int, prompts: Sequence[PromptRecord], fusion: StageFusion) -> Lanes | WithRewards:
        """Scores finished samples and stores their scores; with reward functions, once these have answered too."""
        engines = self._engines

        joined = Joined(self._samples, engines.iteration)

        def keep(scores: list[Scores]) -> None:
            self._samples.score(ScoreRow(s.key, s.ref_logprobs, s.values, s.score, engines.iteration) for s in scores)

        def lane_inference(lane: Lane, collect: Callable[[list[Scores]], None]) -> Inference:
            return Inference(
                engines.http,
                lane,
                lambda: [
                    s
                    for s in self._scorers(lane)
                    if fusion.may_score(s.name, self._generator.idle) and self._out_of_the_way(s, fusion)
                ],
                collect,
                lambda scorer, reason: engines.fleet.failed(scorer.name, reason),
                lambda scorer: engines.fleet.succeeded(scorer.name),
                lambda span: engines.timeline.add([span]),
                everyone=lambda: sum(set(lane) <= set(self._holds(i.name)) for i in engines.fleet.instances("scorer")),
                gone=lambda scorer: engines.fleet.gone(scorer.name, scorer.incarnation),
            )

        if self._calls is None:
            return Lanes(self._lanes, lane_inference, keep)
        rewards = Rewards(
            iteration,
            self._calls,
            self._samples,
            prompts,
            self._spec.ppo.samples_per_prompt,
            lambda sample: self._text(sample.response),
            joined.reward,
            lambda span: engines.timeline.add([span]),
        )
        return WithRewards(Lanes(self._lanes, lane_inference, joined.scores), rewards)

    def _out_of_the_way(self, scorer: Scorer, fusion: StageFusion) -> bool:
        """A freed rollout that can sleep must do so first."""
        rollout = rollout_of(scorer.name)
        return rollout not in fusion.freed or self._sleepers.out_of_the_way(rollout)

    def _swapped(self, name: str, way: str, seconds: float) -> None:
        instance = self._engines.fleet.get(name)
        if instance is not None:
            known = self._fusion.measured(instance.group)
            (known.swapped_in if way == "in" else known.swapped_out)(seconds)

    def _reward_means(self, iteration: int) -> dict[str, float]:
        """reward/<name> of each function: its mean over the iteration's samples, before its weight."""
        by_function: dict[str, list[float]] = {}
        for given in self._samples.rewards(iteration).values():
            for title, reward in given.items():
                by_function.setdefault(title, []).append(reward)
        means = {title: math.fsum(rewards) / len(rewards) for title, rewards in sorted(by_function.items())}
        for title, mean in means.items():
            self._engines.metrics.reward_functions.labels(title).set(mean)
        return {f"reward/{title}": mean for title, mean in means.items()}

    def _text(self, tokens: NDArray[np.int32]) -> str:
        text = self._engines.prepared.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return str(text)

    def _experience(self, iteration: int, prompts: Sequence[PromptRecord]) -> Experience:
        samples = self._samples.experience(iteration)
        prepared = self._engines.prepared
        arrays = experience_arrays(samples, prepared.pad_token_id)
        if self._spec.ppo.ptx_coef > 0:
            arrays |= prepared.ptx_batch(iteration)
        return Experience(
            iteration=iteration,
            prompts=[prompts[s.key.prompt].text for s in samples],
            responses=[self._text(s.tokens) for s in samples],
            arrays=arrays,
            fields=[s.fields for s in samples],
        )
