"""The PPO stage. An iteration consists of generation, inference, training and the transfer of weights. Some iterations
end with a checkpoint."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.coordinator.data.prepare import GivenPrompt, Prepared
from dovetail.coordinator.job import Job
from dovetail.coordinator.loop.experience_maker import ExperienceMaker
from dovetail.coordinator.loop.iteration_report import IterationReport
from dovetail.coordinator.reporting.health import UnhealthyError
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT
from dovetail.coordinator.samples.best_weights import BestWeights
from dovetail.coordinator.samples.evaluation import Evaluator
from dovetail.coordinator.samples.lineup import OpenIterations, Turn
from dovetail.coordinator.schedules.step_commands import StepFacts, optimizer_steps, ppo_step, supervised_step
from dovetail.coordinator.schedules.stored_schedule import applies, scheduled
from dovetail.coordinator.store.manifest_changes import Settled
from dovetail.coordinator.store.samples import State
from dovetail.coordinator.store.store import in_slices
from dovetail.coordinator.workers.ranks import Ranks, StagePlan
from dovetail.coordinator.workers.weights import Weights
from dovetail.manifest.resolve import ppo_config
from dovetail.manifest.sizes import has_critic
from dovetail.manifest.training_types import KL
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol import clock
from dovetail.protocol.experience import Experience
from dovetail.protocol.messages import Span, Step
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.protocol.wire import Array, SampleArrays

ERROR_LIMIT = 0.2

if TYPE_CHECKING:
    from dovetail.coordinator.schedules.scheduling import Scheduling
    from dovetail.coordinator.store.store import KeyValues
    from dovetail.protocol.plan import Layout


def stored_step(
    spec: RLHFJobSpec, plan: Plan, records: KeyValues, settled: Settled, layouts: Mapping[str, Layout], iteration: int
) -> Step:
    """The command that trains one iteration. It is made of the facts that were stored when it first ran.

    `layouts` has the layouts of models that are not where the plan puts them."""
    facts = StepFacts(**records.get(f"ppo/{iteration}/facts"))
    step = settled.settle(ppo_step(spec, plan, iteration, facts, layouts))
    return scheduled(step, facts.schedule, plan.world_size)


@dataclass
class KLController:
    """The coefficient of the KL penalty, `coef`. It is fixed or adaptive (Ziegler et al. 2019, section 2.2). With a
    `target` (KL per sample in nats, summed over its tokens), `update` adapts `coef` to reach the target. `horizon` is a
    number of samples.

    The KL is always the k1 estimate, whatever `kl.in` and the penalty's estimator are. verl's controller uses the mean
    over tokens, so its targets are smaller by the factor of the response length. `coef` is the whole state. A new
    controller with the saved coefficient continues like the old one."""

    coef: float
    target: float | None = None
    horizon: int = 10_000

    @staticmethod
    def from_config(config: KL, coef: float | None = None) -> KLController:
        """The controller for `spec.ppo.kl`. `coef` is the coefficient of a checkpoint. If it is None, the manifest's is
        used."""
        return KLController(config.coef if coef is None else coef, config.target, config.horizon)

    def update(self, kl: float, samples: int) -> float:
        """Adapt the coefficient to an iteration's mean KL per sample (nats) over `samples` samples. Returns the new
        coefficient.

        error = clip(kl / target - 1, -0.2, 0.2); coef *= 1 + error * samples / horizon. Here samples / horizon is at
        most 1, because a large batch could otherwise make the coefficient negative. A fixed coefficient does not
        change. A KL that is not finite changes nothing."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
            self.coef *= 1.0 + error * min(samples / self.horizon, 1.0)
        return self.coef


class PPOStage:
    """The PPO stage of a job. The store holds all state that must survive the coordinator: ppo/progress (the last step
    and the KL coefficient), ppo/<iteration>/facts (what is needed to replay the step) and ppo/totals."""

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        ranks: Ranks,
        weights: Weights,
        maker: ExperienceMaker,
        evaluation: Evaluator,
    ) -> None:
        spec, plan, run_dir, records = job.spec, job.plan, job.folder, job.records
        self._spec, self._plan, self._run_dir = spec, plan, run_dir
        self._kept = BestWeights(spec, run_dir, records.store, ranks, evaluation)
        self._evaluation = evaluation
        self._records, self._prepared, self._sources = records, prepared, job.sources
        self._settled = Settled(spec, records.store)
        self._ranks, self._weights, self._maker = ranks, weights, maker
        self._saving: asyncio.Task[None] | None = None
        # Whether the trainers wait for experience.
        self._idle = False
        self._scheduling: Scheduling | None = None
        self._placing: asyncio.Task[None] | None = None
        self._report = IterationReport(job)
        self._open = OpenIterations(self._iterate, spec.ppo.lag, spec.ppo.iterations)
        if applies(spec, plan):
            from dovetail.coordinator.schedules.scheduling import Scheduling

            self._scheduling = Scheduling(spec, plan, records.store, run_dir, records.log)
            # The search runs during the stages before PPO, because the first search compiles its kernels.
            self._placing = asyncio.create_task(self._scheduling.begin())

    @property
    def buffered(self) -> int:
        """The bytes of the iterations that wait for the trainers. There are at most `lag` + 1 of them."""
        return sum(each.arrays.nbytes for each in self._open.waiting if isinstance(each.arrays, SampleArrays))

    async def close(self) -> None:
        """Cancel the open iterations, and a checkpoint or search that is still running."""
        await self._open.close()
        await cancel(task for task in (self._saving, self._placing) if task is not None)

    async def begin(self) -> None:
        """Load the actor and the critic, and send their weights to the rollouts and scorers."""
        progress = self._records.store.get("ppo/progress") or {"step": 0, "kl_coef": self._spec.ppo.kl.coef}
        self._report.begin()
        self._kl = KLController.from_config(self._spec.ppo.kl, progress["kl_coef"])
        models = {"actor": self._sources.policy()}
        if has_critic(self._spec):
            models["critic"] = self._sources.critic()
        if self._placing is not None:
            await self._placing
        answered = int(progress["step"]) == 0 and await self._answer_before_sft()
        self._ranks.begin(
            StagePlan(
                Stage.PPO,
                models,
                optimizer_steps(self._spec),
                self._ppo_step,
                self._layouts(),
                self._plan.recomputed(Stage.PPO),
                self._can_replay,
                self._spec.ppo.lag,
                self._plan.gathered_by_layer(Stage.PPO),
            ),
            int(progress["step"]),
        )
        self._records.progress.update(
            state="running",
            stage="ppo",
            iteration=self._ranks.step,
            total_iterations=self._spec.ppo.iterations,
            phase="weights",
            message="waiting for rollouts to take the first weights",
        )
        step = self._ranks.step
        self._report.close_interrupted(step, self._ranks.result_of(f"ppo/{step}/step"))
        if self._draws_next(step):
            await self._weights.publish(step)
            if answered:
                await self._evaluation.run(BEFORE_SFT)
            await self._evaluate(step)
        self._save_if_due()
        self._records.timeline.begin()

    async def _answer_before_sft(self) -> bool:
        """If the job runs SFT, let the model before SFT answer the evaluation's prompts. The rollouts are not there
        while SFT runs, so the trainers load and send this model now. Returns whether its answers are still to be
        measured. That needs the scorers, which take their weights later."""
        if Stage.SFT not in self._spec.stages or not self._evaluation.wanted(BEFORE_SFT):
            return False
        stage, plan = Stage.SFT, self._plan
        start = StagePlan(
            stage,
            {stage.model: self._sources.actor()},
            self._prepared.total_steps(stage),
            lambda step: supervised_step(self._spec, plan, stage, step),
            recompute=plan.recomputed(stage),
            zero3=plan.gathered_by_layer(stage),
        )
        self._ranks.begin(start, 0)
        message = "answering prompts that are kept for evaluation, with the model before SFT"
        self._records.progress.update(state="running", stage="ppo", phase="evaluation", message=message)
        await self._weights.publish(BEFORE_SFT)
        await self._evaluation.draw(BEFORE_SFT)
        return True

    async def generate_experience(self, prompts: Sequence[GivenPrompt] | None = None) -> Experience:
        """Generate and score responses to the next iteration's prompts. These are `prompts`, or the job's own if it is
        None.

        With `ppo.lag` this also opens the iterations after this one. Their samples are generated in the background.

        After a crash, results that the store already holds are not computed again. Raises ValueError for `prompts` in a
        job with `ppo.lag`."""
        iteration, lag, progress = self._ranks.step + 1, self._spec.ppo.lag, self._records.progress
        if lag and prompts is not None:
            raise ValueError("prompts of your own cannot be given with spec.ppo.lag above 0; set lag to 0")
        self._open.open_through(iteration, prompts)
        progress.update(iteration=iteration, phase="generation", message="", open_iterations=self._open.numbers)
        self._idle = True
        self.save_if_idle()
        # Without a lag, the trainers wait exactly while the samples are drawn and scored. These phases are measured.
        with self._records.timeline.phase("waiting", iteration) if lag else nullcontext():
            made = await self._open.take(iteration)
        progress.update(open_iterations=self._open.numbers)
        return replace(made, config=ppo_config(self._spec), kl_coef=self._kl.coef)

    async def _iterate(self, iteration: int, given: Sequence[GivenPrompt] | None = None) -> Experience:
        """Make an iteration's experience with the weights that belong to it. With a lag, the trainers train earlier
        iterations meanwhile."""
        prompts = self._maker.begin(iteration, given)
        with self._maker.open(iteration) as turn:
            if turn.alone:
                left = turn.left.count
                self._records.progress.update(samples_done=turn.total - left, samples_total=turn.total)
            await self._reach(turn)
            await self._maker.draw(turn, prompts)
        made = await self._maker.experience(prompts)
        if iteration == self._spec.ppo.iterations:
            self._ranks.need(None)
        return made

    async def _reach(self, turn: Turn) -> None:
        """Returns when a server that may draw the iteration holds its weights. If an evaluation of these weights is
        due, it runs first, after all earlier iterations are scored."""
        version, timeline = turn.version, self._records.timeline
        # The first iterations all use version 0. Only the last of them starts its evaluation.
        due = version == turn.iteration - 1 - self._spec.ppo.lag and self._evaluation.due(version)
        if due:
            await turn.wait_first()
        if turn.left.count:
            await turn.wait_server()
            with timeline.phase("weights", turn.iteration, turn.lane):
                await self._weights.reach(turn)
            self._records.metrics.weight_version.set(version)
        if due:
            with timeline.phase("evaluation", turn.iteration, turn.lane):
                await self._evaluation.run(version)
            self._kept.choose(version)

    def _draws_next(self, version: int) -> bool:
        """Whether the next iteration is drawn with these weights, the newest. All instances then take them at once,
        because nothing is drawn meanwhile. With a lag that holds before the first iteration only. Later weights are
        sent and evaluated when the turn of their iteration comes."""
        return self._spec.ppo.weight_version(version + 1) == version

    async def close_iterations(self) -> None:
        """Close the iterations that are still open, and send the newest weights to all instances that lack them.
        Versions whose evaluation is still due are sent and evaluated first. The trainers keep them."""
        await self._open.close()
        self._records.progress.update(open_iterations=[])
        for version in range(max(0, self._ranks.step - self._spec.ppo.lag), self._ranks.step):
            if self._evaluation.due(version):
                await self._weights.publish(version)
                await self._answer(version)
                self._kept.choose(version)
        if self._weights.version != self._ranks.step:
            await self._weights.publish(self._ranks.step)

    async def _evaluate(self, version: int) -> None:
        """Evaluate the newest weights if that is due, and keep them if they are the best so far. The trainers hold
        these weights and do not train meanwhile."""
        if self._evaluation.due(version):
            await self._answer(version)
        if self._kept.wants(version):
            await self._saved()
            await self._kept.export(version)

    async def evaluate(self) -> dict[str, dict[str, float]]:
        """Evaluate the newest weights now, unless that is done. Returns the mean and the half-width of the 95% interval
        of each metric. Returns {} if there are no prompts to answer. It counts as an evaluation for keepBest and
        stopAfterNoGain. Raises ValueError in a job with `ppo.lag`, because its rollouts hold other weights."""
        if self._spec.ppo.lag:
            raise ValueError("the newest weights cannot be evaluated with spec.ppo.lag above 0; set lag to 0")
        version = self._ranks.step
        if self._evaluation.wanted(version):
            await self._answer(version)
        found = await self._evaluation.run(version)
        return {} if found is None else {name: dict(value) for name, value in found.metrics.items()}

    async def _answer(self, version: int) -> None:
        ends = version in (0, self._spec.ppo.iterations)
        message = "answering prompts that are kept for evaluation" if ends else ""
        self._records.progress.update(phase="evaluation", message=message)
        await self._evaluation.run(version)
        self._records.progress.update(phase=None, message="")

    @property
    def over(self) -> bool:
        """Whether PPO has ended, because all iterations are done or the last evaluations brought no gain for long
        enough.

        Only evaluations of versions count that have certainly run. So the answer depends on the iteration alone."""
        if self._ranks.step >= self._spec.ppo.iterations:
            return True
        step = self._ranks.step
        through = step if self._draws_next(step) else step - 1 - self._spec.ppo.lag
        reason = self._evaluation.reason_to_stop(through)
        if reason is None:
            return False
        self._records.log("ppo.stopped", iteration=self._ranks.step, reason=reason)
        self._records.results.fact("evaluation.stopped", {"iteration": self._ranks.step, "reason": reason})
        self._records.progress.update(total_iterations=self._ranks.step, message=f"PPO ends here: {reason}")
        return True

    async def train(self, experience: Experience) -> dict[str, float]:
        """Train one iteration on `experience`, and send the new weights to all rollouts and scorers. Returns the
        iteration's metrics. Raises ValueError if the experience is of another iteration, and UnhealthyError if the run
        must stop."""
        iteration = experience.iteration
        if iteration != self._ranks.step + 1:
            raise ValueError(f"experience of iteration {iteration} given, {self._ranks.step + 1} expected")
        self._idle = False
        await self._store_step(iteration, experience.arrays)
        await self._records.keep_text(self._spec.samples, experience)
        samples, timeline = self._records.store.samples, self._records.timeline
        await in_slices(lambda rows: samples.advance(iteration, State.IN_BATCH, rows))
        with timeline.phase("training", iteration):
            self._records.progress.update(phase="training")
            await self._saved()
            await self._kept.set_aside(self._ranks.step)
            await self._maker.rest()
            result = await self._ranks.run_step()
            timeline.add(span.model_copy(update={"iteration": iteration}) for span in result.spans)
            if self._scheduling is not None:
                self._scheduling.learn(result, self._spec.ppo.iterations - iteration)
            measured = await asyncio.to_thread(self._report.measured, experience.arrays, result)
            self._refuse_untrue(iteration, measured)
            if self._facts(iteration).train_actor:
                self._kl.update(measured.get("kl", math.nan), len(experience.responses))
            self._records.store.put("ppo/progress", {"step": iteration, "kl_coef": self._kl.coef})
            await in_slices(lambda rows: samples.advance(iteration, State.TRAINED, rows))
        if self._draws_next(iteration):
            with timeline.phase("weights", iteration):
                self._records.progress.update(phase="weights")
                await self._weights.publish(iteration)
            self._records.metrics.weight_version.set(iteration)
        # The trainers have nothing to do while the next iteration's samples are generated.
        self._save_if_due()
        metrics = self._report.close(iteration, experience.arrays, measured, self._maker.facts.pop(iteration, {}))
        try:
            self._report.check(iteration)
        except UnhealthyError:
            await self._saved()  # --resume needs it
            raise
        if self._draws_next(iteration):
            await self._evaluate(iteration)
            timeline.begin()
        return metrics

    async def _store_step(self, iteration: int, arrays: Mapping[str, Array]) -> None:
        """Store the batch of an iteration and the facts of its step, unless they are stored. From these the step can be
        repeated."""
        store = self._records.store
        if store.get(f"ppo/{iteration}/facts") is not None:
            return
        facts = self._facts(iteration)
        if facts.train_actor and self._scheduling is not None:
            schedule = await self._scheduling.current()
            facts = replace(facts, schedule=None if schedule is None else schedule.as_json())
        digest = await asyncio.to_thread(self._records.batches.write, iteration, arrays)
        outcome = await asyncio.to_thread(store.outcome_of, iteration, arrays)
        told = {f"ppo/{iteration}/facts": facts.as_json(), f"ppo/{iteration}/batch": digest}
        store.put_trained(iteration, outcome, told)

    def _refuse_untrue(self, iteration: int, metrics: dict[str, float]) -> None:
        """Raise UnhealthyError if the result of this iteration cannot be trusted. The iteration is then forgotten, so a
        resumed run draws and trains it again."""
        if untrue := self._report.untrue(iteration, metrics):
            self._maker.discard(iteration)
            self._report.check(iteration, untrue)

    def _save_if_due(self) -> None:
        """Start to write the checkpoint of this iteration if the job wants one and it is not there. It is also missing
        after a crash before it was written, and if it was damaged."""
        step = self._ranks.step
        if step and step % self._spec.checkpoint.every_steps == 0 and self._ranks.checkpoint(Stage.PPO)[0] != step:
            self._saving = asyncio.create_task(self._checkpoint(step))

    async def _checkpoint(self, iteration: int) -> None:
        started = clock.now()
        await self._ranks.save()
        # An older checkpoint is kept in case this one is damaged. The batches since then are kept too.
        self._records.batches.forget_through(self._ranks.oldest(Stage.PPO))
        await in_slices(lambda rows: self._records.store.samples.forget_before(iteration, rows))
        span = Span(name="checkpoint", process=COORDINATOR, lane="checkpoint", start=started, end=clock.now())
        self._records.timeline.add([span])

    def save_if_idle(self) -> None:
        """Start to write a checkpoint that is due, if the trainers wait for experience. Otherwise it is written before
        their next step."""
        if self._idle and self._ranks.due:
            self._saving = asyncio.create_task(self._save_after(self._saving))

    async def _save_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await self._ranks.save()

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises what writing it raised."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    def _can_replay(self, first: int, last: int) -> bool:
        store, files = self._records.store, self._records.batches
        return all(files.has(i) and store.get(f"ppo/{i}/facts") is not None for i in range(first + 1, last + 1))

    def _layouts(self) -> dict[str, Layout]:
        return {} if self._scheduling is None else self._scheduling.layouts

    def _facts(self, iteration: int) -> StepFacts:
        """The facts of the next step, with the serial schedule."""
        warm = iteration > self._spec.ppo.critic_warmup_iterations or not has_critic(self._spec)
        return StepFacts(self._kl.coef, warm)

    def _ppo_step(self, iteration: int) -> Step:
        store = self._records.store
        return stored_step(self._spec, self._plan, store, self._settled, self._layouts(), iteration)

    async def finish(self) -> None:
        """Evaluate the last weights, which the rollouts and scorers hold, and export the trained models."""
        version = self._ranks.step
        if self._evaluation.wanted(version):
            await self._answer(version)
        self._evaluation.note_end(version)
        await self._saved()
        if self._kept.wants(version):
            await self._kept.export(version)
        self._kept.close(version)
        if self._scheduling is not None:
            await self._scheduling.close()
        self._records.progress.update(phase="export", message="exporting models")
        folder = self._run_dir / "models"
        await self._ranks.export("actor", folder / "actor")
        if self._spec.ppo.ema is not None:
            await self._ranks.export("ema", folder / "actor-ema")
        if has_critic(self._spec):
            await self._ranks.export("critic", folder / "critic")
        self._save_if_due()
        await self._saved()
