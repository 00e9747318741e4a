"""The SFT, reward-model and DPO stages. Each consists of an evaluation, steps with checkpoints, another evaluation and
the export."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.coordinator.job import Job
from dovetail.coordinator.schedules.step_commands import supervised_step
from dovetail.coordinator.schedules.stored_schedule import applies, scheduled
from dovetail.coordinator.serving.served_batches import Batches
from dovetail.coordinator.store.identity import check_model
from dovetail.coordinator.store.manifest_changes import Settled
from dovetail.coordinator.store.store import KeyValues
from dovetail.coordinator.workers.ranks import Ranks, StagePlan
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import CommandResult, ModelRef, Step

if TYPE_CHECKING:
    from dovetail.coordinator.schedules.scheduling import StageSchedules

# checkpoint.everySteps counts PPO iterations. SFT and reward steps are much shorter, so ten of them count as one.
STEPS_PER_CHECKPOINT_UNIT = 10


@dataclass(frozen=True)
class SupervisedStage:
    """One supervised stage. `recompute` names the models with activation checkpointing, and `zero3` those under ZeRO-3.
    `references(k)` runs before step k + 1, and with 0 before the evaluation. It computes what they need of the stage's
    initial weights. `centred` says that the stage trains a reward model, whose scores are centred in the export. Their
    mean over `demonstrations` becomes 0. Without demonstrations it is the mean over the preferred responses.
    `schedules` has the schedules of its steps. If it is None, they run the serial one."""

    stage: Stage
    model: str
    source: ModelRef
    steps: int
    make_step: Callable[[int], Step]
    eval_batches: list[str]
    export_to: Path
    checkpoint_every: int
    recompute: list[str] = field(default_factory=list)
    centred: bool = False
    demonstrations: list[str] = field(default_factory=list)
    references: Callable[[int], Awaitable[None]] | None = None
    zero3: list[str] = field(default_factory=list)
    schedules: StageSchedules | None = None


@dataclass
class Hooks:
    """The functions that a stage calls while it runs. `wall_seconds` returns the seconds that the job has run, over all
    restarts."""

    on_step: Callable[[Stage, int, int, CommandResult], None]
    on_fact: Callable[[str, float], None]
    wall_seconds: Callable[[], float]


async def run_supervised(stage: SupervisedStage, session: Ranks, records: KeyValues, hooks: Hooks) -> None:
    """Run the stage. It continues at the step that its records name. Raises TrainerError.

    Facts: <stage>/before and <stage>/after hold the evaluation's metrics. <stage>/done says that the export is
    complete."""
    name = stage.stage.value
    done = records.get(f"{name}/step")
    models = {stage.model: stage.source}
    if stage.schedules is not None:
        await stage.schedules.begin()
    layouts = {} if stage.schedules is None else stage.schedules.layouts
    session.begin(
        StagePlan(
            stage.stage, models, stage.steps, stage.make_step, layouts, recompute=stage.recompute, zero3=stage.zero3
        ),
        int(done) if isinstance(done, int) else 0,
    )
    if records.get(f"{name}/began") is None:
        records.put(f"{name}/began", hooks.wall_seconds())
    began = records.get(f"{name}/began")
    assert isinstance(began, float)
    if records.get(f"{name}/before") is None and session.step == 0:
        if stage.references is not None:
            await stage.references(0)
        records.put(f"{name}/before", await session.evaluate(stage.eval_batches))
    while session.step < stage.steps:
        # After a crash the checkpoint may not be written yet.
        if session.step % (stage.checkpoint_every * STEPS_PER_CHECKPOINT_UNIT) == 0 and session.step:
            await session.save()
        if stage.references is not None:
            await stage.references(session.step)
        if stage.schedules is not None:
            await stage.schedules.decide(session.step + 1)
        result = await session.run_step()
        records.put(f"{name}/step", session.step)
        if stage.schedules is not None and session.step < stage.steps:
            stage.schedules.learn(result, stage.steps - session.step)
        hooks.on_step(stage.stage, session.step, stage.steps, result)
    if stage.schedules is not None:
        await stage.schedules.close()
    after = await session.evaluate(stage.eval_batches, stage.demonstrations)
    records.put(f"{name}/after", after)
    await session.export(stage.model, stage.export_to, centre(after) if stage.centred else 0.0)
    if session.folders is not None:
        await session.folders.remember(stage.export_to)
    records.put(f"{name}/done", True)  # it is on the disk before `forget` deletes the checkpoints
    session.forget(stage.stage)
    hooks.on_fact(f"stages.{name}", hooks.wall_seconds() - began)


def centre(evaluation: Mapping[str, float]) -> float:
    """The score that centring makes 0 (Ouyang et al. 2022, section 3.5). It is the mean score over the demonstrations.
    Without demonstrations it is the mean over the preferred responses of the held-out pairs. Without these too it is
    0."""
    if evaluation.get("demonstrations"):
        return evaluation["demonstration_score"]
    return evaluation.get("chosen", 0.0)


class SupervisedStages:
    """The job's SFT, reward-model and DPO stages. Each continues at the step that the store names. A finished stage is
    skipped.

    `steps(stage)` returns the number of steps of a stage. Only exported models of the job's run are accepted."""

    def __init__(self, job: Job, session: Ranks, batches: Batches, steps: Callable[[Stage], int]) -> None:
        self._spec, self._plan, self._models, self._run_id = job.spec, job.plan, job.folder / "models", job.run
        self._records, self._session, self._sources = job.records, session, job.sources
        self._settled = Settled(job.spec, job.records.store)
        self._batches, self._steps = batches, steps

    async def sft(self) -> None:
        """Fine-tune the actor on demonstrations. The result is models/sft. Facts: sft.loss_before, sft.loss_after."""
        await self._run(self._stage(Stage.SFT, self._sources.actor()))
        for when in ("before", "after"):
            metrics = self._records.store.get(f"sft/{when}")
            if metrics:
                self._records.results.fact(f"sft.loss_{when}", metrics["loss"])

    async def reward(self) -> None:
        """Train and centre the reward model. The result is models/reward. Facts: reward_model.accuracy, .pairs,
        .centre."""
        demonstrations = [f"demonstrations/{i}" for i in range(len(self._batches.demonstrations()))]
        stage = self._stage(Stage.REWARD, self._sources.reward())
        await self._run(replace(stage, centred=True, demonstrations=demonstrations))
        after = self._records.store.get("reward/after")
        if after:
            self._records.results.fact("reward_model.accuracy", after["accuracy"])
            self._records.results.fact("reward_model.pairs", after["pairs"])
            self._records.results.fact("reward_model.centre", centre(after))

    async def dpo(self) -> None:
        """Train the actor on preferences. The result is models/actor. Facts: dpo.method, .loss_before, .loss_after,
        .accuracy, and .pairs or .responses."""
        stage = self._stage(Stage.DPO, self._sources.actor_for_ppo())
        references = partial(self._references, stage)
        await self._run(replace(stage, export_to=self._models / "actor", references=references))
        self._records.results.fact("dpo.method", self._spec.dpo.loss)
        before, after = (self._records.store.get(f"dpo/{when}") for when in ("before", "after"))
        if before:
            self._records.results.fact("dpo.loss_before", before["loss"])
        if after:
            self._records.results.fact("dpo.loss_after", after["loss"])
            self._records.results.fact("dpo.accuracy", after["accuracy"])
            count = "pairs" if "pairs" in after else "responses"
            self._records.results.fact(f"dpo.{count}", after[count])

    async def _references(self, stage: SupervisedStage, step: int) -> None:
        """Let the trainers compute the reference log-probabilities of the responses that the next steps use, each once,
        unless those of the next step are known. The store keeps them.

        The trainers load the initial weights for that, and then the last checkpoint again. So it is done where a
        checkpoint is written, and each time for three times as many steps as are done."""
        known = self._batches.references
        if step and known.has(self._batches.arrays(f"dpo/{step + 1}")):
            return
        unit = stage.checkpoint_every * STEPS_PER_CHECKPOINT_UNIT
        last = min(stage.steps, unit * max(1, -(-4 * step // unit)))
        batches = [f"dpo/{k}" for k in range(step + 1, last + 1)] + ([] if step else stage.eval_batches)
        told = -1
        for number, key in enumerate(batches):
            arrays = self._batches.arrays(key)
            if not known.has(arrays):
                if (tenth := 10 * number // len(batches)) > told:
                    told, message = tenth, f"computing the reference's log-probabilities of steps {step + 1} to {last}"
                    self._records.progress.update(message=f"{message}: {number} of {len(batches)} batches")
                known.add(key, arrays, await self._session.logprobs(key))
        self._records.progress.update(message="")

    def _stage(self, stage: Stage, source: ModelRef) -> SupervisedStage:
        schedules: StageSchedules | None = None
        if applies(self._spec, self._plan, stage) and not self._records.store.get(f"{stage.value}/done"):
            # The search loads numba.
            from dovetail.coordinator.schedules.scheduling import StageSchedules

            store, log = self._records.store, self._records.log
            schedules = StageSchedules(self._spec, self._plan, store, self._models.parent, log, stage)

        def make_step(k: int) -> Step:
            layouts, chosen = (None, None) if schedules is None else (schedules.layouts, schedules.of(k))
            step = self._settled.settle(supervised_step(self._spec, self._plan, stage, k, layouts))
            return scheduled(step, chosen, self._plan.world_size)

        return SupervisedStage(
            stage=stage,
            model=stage.model,
            source=source,
            steps=self._steps(stage),
            make_step=make_step,
            eval_batches=[f"{stage.value}-eval/{i}" for i in range(len(self._batches.held_out(stage)))],
            export_to=self._models / stage.value,
            checkpoint_every=self._spec.checkpoint.every_steps,
            recompute=self._plan.recomputed(stage),
            zero3=self._plan.gathered_by_layer(stage),
            schedules=schedules,
        )

    async def _run(self, stage: SupervisedStage) -> None:
        records, name = self._records, stage.stage.value
        if records.store.get(f"{name}/done"):
            check_model(stage.export_to, self._run_id)
            # A coordinator that was killed as the stage ended may have left its checkpoints.
            self._session.forget(stage.stage)
            return
        warning = self._batches.equal_pairs() if stage.stage.has_pairs else ""
        if warning:
            records.log("data.equal_pairs", level="warning", stage=name, message=warning)
        told = {"message": warning} if warning else {}
        records.progress.update(state="running", stage=name, step=0, total_steps=stage.steps, phase="training", **told)
        hooks = Hooks(self._on_step, records.results.fact, records.results.wall_seconds)
        await run_supervised(stage, self._session, records.store, hooks)
        records.log("stage.finished", stage=name)

    def _on_step(self, stage: Stage, step: int, total: int, result: CommandResult) -> None:
        records = self._records
        records.history.add(stage, step, result.metrics)
        records.metrics.stage_step.labels(stage.value).set(step)
        records.metrics.steps.labels(stage.value).inc()
        records.progress.update(step=step, total_steps=total, metrics=result.metrics, message="")
