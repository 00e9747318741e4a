"""The SFT and reward-model stages: evaluate, steps with checkpoints, evaluate, export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.coordinator.trainers.trainer_session import Records, StagePlan, TrainerSession
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import CommandResult, ModelRef, Step

# checkpoint.everySteps counts PPO iterations and tens of the much shorter SFT and reward steps.
STEPS_PER_CHECKPOINT_UNIT = 10


@dataclass(frozen=True)
class SupervisedStage:
    """`recompute`: models that make their activations again in the backward pass. `centred`: a reward model, whose mean
    score over `demonstrations` becomes 0 when it is exported; without any, that over the preferred responses."""

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


@dataclass
class Hooks:
    """What the stage tells the rest of the coordinator as it goes, and asks: the job's seconds, over restarts."""

    on_step: Callable[[Stage, int, int, CommandResult], None]
    on_fact: Callable[[str, float], None]
    wall_seconds: Callable[[], float]


async def run_supervised(stage: SupervisedStage, session: TrainerSession, records: Records, hooks: Hooks) -> None:
    """Run the stage from wherever its records say it is.

    Facts: <stage>/before and <stage>/after hold the evaluation's metrics, <stage>/done that the export is complete."""
    name = stage.stage.value
    done = records.get(f"{name}/step")
    session.begin(
        StagePlan(stage.stage, {stage.model: stage.source}, stage.steps, stage.make_step, recompute=stage.recompute),
        int(done) if isinstance(done, int) else 0,
    )
    if records.get(f"{name}/began") is None:
        records.put(f"{name}/began", hooks.wall_seconds())
    began = records.get(f"{name}/began")
    assert isinstance(began, float)
    if records.get(f"{name}/before") is None and session.step == 0:
        records.put(f"{name}/before", await session.evaluate(stage.eval_batches))
    while session.step < stage.steps:
        result = await session.run_step()
        records.put(f"{name}/step", session.step)
        hooks.on_step(stage.stage, session.step, stage.steps, result)
        if session.step % (stage.checkpoint_every * STEPS_PER_CHECKPOINT_UNIT) == 0 and session.step < stage.steps:
            await session.save()
    after = await session.evaluate(stage.eval_batches, stage.demonstrations)
    records.put(f"{name}/after", after)
    await session.export(stage.model, stage.export_to, centre(after) if stage.centred else 0.0)
    records.put(f"{name}/done", True)  # on the disk before `forget` deletes the checkpoints
    session.forget(stage.stage)
    hooks.on_fact(f"stages.{name}", hooks.wall_seconds() - began)


def centre(evaluation: Mapping[str, float]) -> float:
    """The score that becomes 0 (Ouyang et al. 2022, section 3.5): the mean over demonstrations, else over the preferred
    responses of the held-out pairs; 0 without either."""
    if evaluation.get("demonstrations"):
        return evaluation["demonstration_score"]
    return evaluation.get("chosen", 0.0)
