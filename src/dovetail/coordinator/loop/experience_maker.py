"""Makes the experience of an iteration. It runs generation on the rollouts and inference on the scorers, and builds the
arrays to train on."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import aiohttp
import numpy as np

from dovetail.coordinator.coordinated_job import CoordinatedJob
from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.data.prepare import Prepared, PromptRecord
from dovetail.coordinator.data.seeds import sample_seed
from dovetail.coordinator.data.text.texts import Texts
from dovetail.coordinator.loop.dynamic_sampling import Further, IterationPrompts, replaced_key
from dovetail.coordinator.loop.experience_assembly import ExperienceAssembly
from dovetail.coordinator.loop.record import record
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT
from dovetail.coordinator.rewards.calls import Calls, evaluation_slot
from dovetail.coordinator.samples.evaluation_metrics import HeldOutAnswer
from dovetail.coordinator.samples.fusion.fused_stage import generate_and_score
from dovetail.coordinator.samples.fusion.fusion import Fusion, StageFusion
from dovetail.coordinator.samples.fusion.sleep import Sleepers
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.samples.lineup import KIND as ROLLOUT
from dovetail.coordinator.samples.lineup import Lineup, Turn
from dovetail.coordinator.samples.reward_stage import Joined, Rewards, WithRewards
from dovetail.coordinator.samples.scorer_models import ScorerModels
from dovetail.coordinator.samples.scoring import Finished, Inference, Scorer, Scores
from dovetail.coordinator.samples.scoring_lanes import Lane, ScorerLanes
from dovetail.coordinator.store.samples import Key, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import StoreError, in_slices
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.publishing import Target
from dovetail.manifest.critic import has_critic
from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.experience import Experience
from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import rollout_of
from dovetail.protocol.sampling import asked_of_servers

# Inference fails after this time without a scored sample.
INFERENCE_SECONDS = 900.0
REWARD_MODEL = "reward"


def samples_lane(iteration: int, lag: int) -> str:
    """The timeline's lane of an iteration whose samples are generated while the trainers train. There are as many lanes
    as iterations may be open."""
    return f"samples {1 + (iteration - 1) % (lag + 1)}"


def _together(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The facts of an iteration from those of its rounds. Seconds and numbers of samples are added up. The other facts
    are those of the last round."""
    found = dict(rounds[-1])
    for name in ("fusion_migrated", "fusion_hidden_seconds", "fusion_saved_seconds", "fusion_stage_seconds"):
        found[name] = sum(facts[name] for facts in rounds)
    return found


class ExperienceMaker:
    """Runs generation and inference of the PPO stage. All state is in the store.

    `calls` has the reward functions, which replace a reward model. `published()` says whether PPO has begun to publish
    weights. A first rollout may take `start_seconds` to start. With `ppo.lag`, `on_first(version)` is called when the
    oldest open iteration uses another version than the one before. `facts` has for each iteration the metrics of
    inter-stage fusion and of each reward function. The caller removes them."""

    def __init__(
        self,
        job: CoordinatedJob,
        prepared: Prepared,
        folders: ModelFolders,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        token: str,
        calls: Calls | None,
        published: Callable[[], bool],
        start_seconds: float,
        on_first: Callable[[int], None] = lambda version: None,
    ) -> None:
        spec, plan, records, sources = job.spec, job.plan, job.records, job.sources
        self._spec, self._records, self._prepared = spec, records, prepared
        self._fleet, self._session, self._folders = fleet, session, folders
        self._samples = records.store.samples
        self._calls = calls
        self._published = published
        self._colocated = {g.name for g in spec.groups if g.colocated}
        wanted = {"reference": sources.reference} if spec.ppo.reads_reference else {}
        if calls is None:
            wanted[REWARD_MODEL] = sources.reward_for_ppo
        if has_critic(spec):
            wanted["critic"] = sources.critic
        self._texts = Texts(prepared.tokenizer, prepared.actor_config_dir)
        self._assembly = ExperienceAssembly(self._samples, self._texts, prepared.pad_token_id, calls)
        self._models = ScorerModels(wanted, {r.name: r.scores for r in plan.rollouts}, fleet, session, folders)
        self.facts: dict[int, dict[str, float]] = {}
        self._waking: asyncio.Task[None] | None = None
        self._sleepers = Sleepers(fleet, session, records.log, self._swapped)
        # The version of the rollouts' weights when the trainers began to use their GPUs.
        self._trained_beside: int | None = None
        self._found: asyncio.Task[None] | None = None
        self._fusion = Fusion(spec, records.store, records.log)
        gather = spec.plan.inter_stage_fusion not in ("Off", 0)
        self._lineup = Lineup(fleet, spec.generation.max_concurrent, gather, records.log, on_first)
        self._generator = Generator(
            records.store,
            fleet,
            asked_of_servers(spec),
            token,
            records.log,
            GenerationSettings(wait=start_seconds),
            decode=lambda tokens: str(prepared.tokenizer.decode(tokens, skip_special_tokens=False)),
            replay=spec.ppo.routing_replay,
        )

    def end_beside(self) -> None:
        """Call it after the last `make_beside`. All rollouts then take the current weights."""
        self._lineup.end()

    async def close(self) -> None:
        if self._found is not None:
            self._found.cancel()
        self._sleepers.close()
        self._texts.close()
        await self._models.close()
        await self._generator.close()

    def left(self, name: str) -> bool:
        """Whether a retired rollout may end, because no sample needs it any more. Always true for scorers."""
        return self._generator.left(name)

    async def rest(self) -> None:
        """Call it before training. Rollouts of groups that also train leave their GPUs to the trainers until they take
        the new weights."""
        self._trained_beside = self._fleet.version
        await self._rest()

    async def _rest(self) -> None:
        rollouts = self._fleet.instances(ROLLOUT)
        await self._sleepers.rest([i.name for i in rollouts if i.ready and i.group in self._colocated])

    async def in_batch(self, iteration: int) -> None:
        """Mark the iteration's samples as those of the next step."""
        await in_slices(lambda rows: self._samples.advance(iteration, State.IN_BATCH, rows))

    async def trained(self, iteration: int) -> None:
        """Mark the iteration's samples as trained on."""
        await in_slices(lambda rows: self._samples.advance(iteration, State.TRAINED, rows))

    def discard(self, iteration: int) -> None:
        """Drop the iteration's samples. Others are generated when the run goes on."""
        self._records.store.forget(iteration, [replaced_key(iteration)])

    # ------------------------------------------------------------ scorers

    async def prepare_instance(self, target: Target) -> None:
        """Prepare an instance for new weights: wake a rollout, or load a scorer's models. Raises OSError or
        TimeoutError, and DataError if the files that it loads have changed."""
        if target.kind == "rollout":
            await self._folders.check(self._folders.for_rollouts)
            await self._sleepers.wake(target.name)
        if target.kind == "scorer":
            await self._models.load(Scorer(target.name, target.url, target.incarnation))

    async def hold(self) -> None:
        """Run as a background task. Once PPO has begun, it loads the models of scorers that need no weight version.
        Until then it keeps the rollouts that share GPUs with trainers asleep. After a restart of the coordinator these
        may hold their weights already. It wakes those when PPO has begun, and those that report later, unless the
        trainers train."""
        resting = False
        while True:
            if not self._published():
                resting = True
                await self._rest()
            elif resting:
                resting = False
                await self._sleepers.wake_current()
            else:
                trains = self._trained_beside is not None and self._trained_beside == self._fleet.version
                if not trains and (self._found is None or self._found.done()):
                    # A server may take long to wake up.
                    self._found = asyncio.create_task(self._sleepers.wake_found())
                await self._models.load_all()
            await asyncio.sleep(0.5)

    # ------------------------------------------------------------ the iteration

    async def make(self, iteration: int, prompts: Sequence[PromptRecord], further: Further | None = None) -> Experience:
        """Generate and score responses with the weights that the rollouts and scorers hold. Results that the store
        already holds are not computed again. `further` gives the prompts of further rounds, with `ppo.dynamicSampling`.
        Raises GenerationError, RewardError, StoreError or TimeoutError."""
        ppo, store = self._spec.ppo, self._records.store
        drawn = IterationPrompts(
            iteration,
            prompts,
            store,
            lambda position, record: self._samples_of(iteration, position, record),
            ppo.dynamic_sampling,
            further,
        )
        self._samples.begin_iteration(iteration, drawn.samples())
        facts: list[dict[str, float]] = []
        while True:
            total = len(prompts) * ppo.samples_per_prompt
            self._records.progress.update(samples_done=0, samples_total=total, phase="generation")
            await self._make(iteration, drawn.records, drawn.newest, total, None)
            facts.append(self.facts[iteration])
            if not drawn.replace_equal():
                break
            self._records.log(
                "prompts.replaced", iteration=iteration, round=drawn.round, prompts=drawn.replaced, of=len(prompts)
            )
        if ppo.dynamic_sampling:
            self.facts[iteration] = _together(facts) | {
                "sampling_rounds": 1.0 + drawn.round,
                "prompts_replaced": float(drawn.replaced),
            }
        return await self._experience(iteration, drawn.records)

    async def make_beside(
        self,
        iteration: int,
        prompts: Sequence[PromptRecord],
        reach: Callable[[Turn], Awaitable[None]],
        evaluates: bool = False,
    ) -> Experience:
        """The same as `make`, while the trainers train and other iterations are open. `reach` is called if samples are
        still to be drawn, or if it `evaluates` the weights. It returns when a server holds the iteration's weights."""
        new = [s for position, record in enumerate(prompts) for s in self._samples_of(iteration, position, record)]
        self._samples.begin_iteration(iteration, new)
        unfinished = self._samples.counts(iteration).get(State.PENDING, 0) or int(evaluates)
        total = len(prompts) * self._spec.ppo.samples_per_prompt
        with self._lineup.open(iteration, self._spec.ppo.weight_version(iteration), total, unfinished) as turn:
            if unfinished:
                await reach(turn)
            await self._make(iteration, prompts, range(len(prompts)), total, turn)
        return await self._experience(iteration, prompts)

    async def _make(
        self,
        iteration: int,
        prompts: Sequence[PromptRecord],
        newest: Sequence[int],
        total: int,
        turn: Turn | None,
    ) -> None:
        """Generate and score those of the iteration's `total` samples that the store lacks. `prompts` has all prompts
        by position, and `newest` the positions of this round's prompts."""
        records, fleet = self._records, self._fleet
        scoring: list[Span] = []
        if self._calls is not None:
            await self._calls.open()
        begun = time.time()
        before = sum(n for state, n in self._samples.counts(iteration).items() if state is not State.PENDING)

        def progress(done: int, left: int) -> None:
            if turn is None or turn.first:
                records.progress.update(samples_done=before + done, samples_total=total)
                records.metrics.samples_left.set(left - done)
            waking = self._waking is not None and not self._waking.done()
            if done < left and not waking and not fleet.has_current(ROLLOUT):
                # No other rollout is left to generate.
                self._waking = asyncio.create_task(self._sleepers.wake_all())
            elif fusion.destinations:
                self._sleepers.expect(fusion.freed)
                self._sleepers.free(name for name in fusion.freed if self._generator.idle(name))

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            if turn is not None:
                # The status shows the phase of the trainers instead.
                with records.timeline.phase(name, iteration, samples_lane(iteration, self._spec.ppo.lag)):
                    yield
                return
            records.progress.update(phase=name)
            with records.timeline.phase(name):
                yield

        def scored(span: Span) -> None:
            scoring.append(span)
            records.timeline.add([span])

        lengths = [len(prompts[p].token_ids) for p in newest for _ in range(self._spec.ppo.samples_per_prompt)]
        earlier = records.timeline.phases.get("generation", 0.0)
        rollouts = fleet.eligible(ROLLOUT)
        blocks = RESPONSE_BLOCK if any(i.abilities.get("room") for i in fleet.instances("scorer")) else None
        async with (
            self._fusion.stage(iteration, lengths, rollouts, blocks) as fusion,
            self._inference(iteration, prompts, fusion, scored, turn) as inference,
        ):
            done = await generate_and_score(
                iteration, self._samples, self._generator, inference, fusion, INFERENCE_SECONDS, phase, progress, turn
            )
        phases = records.timeline.phases if turn is None else records.timeline.of(iteration)
        generated = begun + phases["generation"] - (earlier if turn is None else 0.0)
        records.metrics.samples.inc(done.samples)
        records.metrics.tokens.inc(done.tokens)
        records.timeline.add(done.spans)
        self.facts[iteration] = record(
            records,
            self._spec.plan.inter_stage_fusion,
            len(fleet.instances("scorer")),
            iteration,
            fusion,
            done,
            begun,
            generated,
            scoring,
            None if turn is None else samples_lane(iteration, self._spec.ppo.lag),
        ) | self._reward_means(iteration)
        groups = {i.name: i.group for i in fleet.instances()}
        # A sample that goes through several lanes counts once.
        shares = [
            s.model_copy(update={"args": {**s.args, "tokens": s.args["tokens"] // len(self._models.lanes)}})
            for s in scoring
        ]
        self._fusion.learn(groups, done, shares)
        self._fusion.end(self._samples.lengths(iteration))

    async def answer(
        self,
        version: int,
        records: Sequence[PromptRecord],
        seeds: Sequence[Sequence[int]],
        temperature: float | None,
        rewarded: bool,
    ) -> list[HeldOutAnswer]:
        """The answers to evaluation prompts, drawn with the weights `version`, which the rollouts and scorers hold.
        They are not trained on. `seeds` has the seeds of each prompt's samples. If `temperature` is None, the job's own
        is used. `rewarded` says whether the answers get rewards. The result is ordered by prompt and sample. The
        scorers hold version 0 when the answers of BEFORE_SFT get their rewards.

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
        asked = asked_of_servers(self._spec, temperature)
        await self._generator.generate(slot, generation=asked, turn=self._lineup.first)
        if rewarded:
            await self._reward(version, records, len(seeds[0]))
        found = self._samples.samples(slot)
        for held in (v for s in found for v in (s.first_version, s.weight_version)):
            if held != version:
                raise StoreError(f"answers of weight version {version} were drawn with version {held}")
        by_index = {record.index: record for record in records}
        texts = await asyncio.to_thread(lambda: [self._texts.of(s.tokens) for s in found])
        return [
            HeldOutAnswer(by_index[s.key.prompt], s.key.sample, text, len(s.tokens), s.finish_reason, s.reward, raw)
            for s, (text, raw) in zip(found, texts, strict=True)
        ]

    async def _reward(self, version: int, records: Sequence[PromptRecord], samples_per_prompt: int) -> None:
        """Store the rewards of the answers drawn with the weights `version`. The job's reward functions or its reward
        model give them."""
        slot = evaluation_slot(version)
        finished = [Finished(s.key, s.prompt_tokens, s.tokens) for s in self._samples.samples(slot, State.GENERATED)]

        def keep(key: Key, reward: float | None) -> None:
            self._samples.score([ScoreRow(key, None, None, reward)])

        if self._calls is not None:
            await self._calls.open()
            async with Rewards(
                slot,
                self._calls,
                self._samples,
                self._prepared.for_rewards(records),
                samples_per_prompt,
                lambda sample: self._texts.later(sample.response),
                keep,
            ) as rewards:
                rewards.add(finished)
                await rewards.finish()
            return
        lane = next(lane for lane in self._models.lanes if REWARD_MODEL in lane)

        def collect(scores: list[Scores]) -> None:
            for one in scores:
                keep(one.key, one.score)

        held = 0 if version == BEFORE_SFT else version
        async with self._asked((REWARD_MODEL,), lane, held, lambda _: True, collect, lambda _: None) as inference:
            inference.add(finished)
            await inference.finish(INFERENCE_SECONDS)

    def _asked(
        self,
        want: Sequence[str],
        lane: Lane,
        version: int,
        allowed: Callable[[Scorer], bool],
        collect: Callable[[list[Scores]], None],
        on_span: Callable[[Span], None],
    ) -> Inference:
        """Inference of the models `want`, on the scorers that hold the lane's models and are `allowed`. `version` is
        the critic's version, for scorers that hold a critic."""
        fleet = self._fleet
        return Inference(
            self._session,
            want,
            lambda: [s for s in self._models.scorers(lane, version) if allowed(s)],
            collect,
            lambda scorer, reason: fleet.failed(scorer.name, reason),
            lambda scorer: fleet.succeeded(scorer.name),
            on_span,
            everyone=lambda: sum(self._models.serves(i.name, lane) for i in fleet.instances("scorer")),
            gone=lambda scorer: fleet.gone(scorer.name, scorer.incarnation),
        )

    def _samples_of(self, iteration: int, position: int, record: PromptRecord) -> list[NewSample]:
        tokens, seed = np.asarray(record.token_ids, np.int32), self._spec.seed
        return [
            NewSample(position, s, tokens, sample_seed(seed, iteration, position, s), record.fields)
            for s in range(self._spec.ppo.samples_per_prompt)
        ]

    def _inference(
        self,
        iteration: int,
        prompts: Sequence[PromptRecord],
        fusion: StageFusion,
        on_span: Callable[[Span], None],
        turn: Turn | None,
    ) -> ScorerLanes | WithRewards:
        """Inference that stores the scores of finished samples. With reward functions, a sample is stored when its
        reward is known too."""
        records = self._records
        version = self._spec.ppo.weight_version(iteration)
        joined = Joined(self._samples, version)

        def keep(scores: list[Scores]) -> None:
            self._samples.score(ScoreRow(s.key, s.ref_logprobs, s.values, s.score, version) for s in scores)

        def allowed(scorer: Scorer) -> bool:
            now = turn is None or turn.first
            return now and fusion.may_score(scorer.name, self._generator.idle) and self._out_of_the_way(scorer, fusion)

        def lane_inference(lane: Lane, collect: Callable[[list[Scores]], None]) -> Inference:
            return self._asked(
                lane,
                lane,
                version,
                allowed,
                collect,
                lambda span: on_span(span.model_copy(update={"iteration": iteration})),
            )

        if self._calls is None:
            return ScorerLanes(self._models.lanes, lane_inference, keep)
        rewards = Rewards(
            iteration,
            self._calls,
            self._samples,
            prompts,
            self._spec.ppo.samples_per_prompt,
            lambda sample: self._texts.later(sample.response),
            joined.reward,
            lambda span: records.timeline.add([span]),
        )
        return WithRewards(ScorerLanes(self._models.lanes, lane_inference, joined.scores), rewards)

    def _out_of_the_way(self, scorer: Scorer, fusion: StageFusion) -> bool:
        """Whether the rollout beside a scorer leaves the device to it. A freed rollout that can sleep must be asleep
        first."""
        rollout = rollout_of(scorer.name)
        return rollout not in fusion.freed or self._sleepers.out_of_the_way(rollout)

    def _swapped(self, name: str, way: str, seconds: float) -> None:
        instance = self._fleet.get(name)
        if instance is not None:
            known = self._fusion.measured(instance.group)
            (known.swapped_in if way == "in" else known.swapped_out)(seconds)

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

    async def _experience(self, iteration: int, prompts: Sequence[PromptRecord]) -> Experience:
        version = self._spec.ppo.weight_version(iteration)
        made = await asyncio.to_thread(self._assembly.experience, iteration, version, prompts)
        if self._spec.ppo.ptx_coef > 0:
            made.arrays |= self._prepared.ptx_batch(iteration)
        return made
