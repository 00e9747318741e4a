"""The command for a training step of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.schedules.serial_schedule import serial_1f1b
from dovetail.manifest.checks.batching import batch_rules
from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage
from dovetail.protocol.messages import Step
from dovetail.protocol.plan import Plan


def optimizer_steps(spec: RLHFJobSpec) -> int:
    """The number of optimizer steps of the whole PPO stage."""
    return spec.ppo.iterations * spec.ppo.steps_per_iteration


def schedule(
    spec: RLHFJobSpec,
    plan: Plan,
    stage: Stage,
    models: Sequence[str],
    placed: Mapping[str, Parallelism] | None = None,
) -> dict[str, Any]:
    """The fields of a step that say how a mini-batch is divided, and the actions of each rank for it. The ranks run
    1F1B of one model after another. `placed` has layouts that replace the plan's."""
    rules = {rule.model: rule for rule in batch_rules(spec) if rule.stage is stage}
    layouts = {name: (placed or {}).get(name) or plan.parallelism[name] for name in models}
    counts = {name: rules[name].batch // (layout.dp * rules[name].micro) for name, layout in layouts.items()}
    split = not plan.recomputed(stage) and not plan.gathered_by_layer(stage)
    fields: dict[str, Any] = {"actions": serial_1f1b(layouts, counts, list(models), plan.world_size, split)}
    if (tokens := rules[models[0]].tokens) is not None:
        chosen = [row.micro_batch_tokens for row in plan.batching if row.stage is stage and row.model in models]
        fields["micro_batch_tokens"] = min((each for each in chosen if each is not None), default=tokens)
    return fields


@dataclass(frozen=True)
class StepFacts:
    """The facts that make an exact replay of a PPO step possible. `schedule` is a `StoredSchedule` as JSON, or None for
    the serial schedule."""

    kl_coef: float
    train_actor: bool
    schedule: dict[str, Any] | None = None

    def as_json(self) -> dict[str, object]:
        return {"kl_coef": self.kl_coef, "train_actor": self.train_actor, "schedule": self.schedule}


def ppo_step(
    spec: RLHFJobSpec,
    plan: Plan,
    iteration: int,
    facts: StepFacts,
    placed: Mapping[str, Parallelism] | None = None,
) -> Step:
    """The command that trains one iteration with the serial schedule. `placed` has layouts that replace the plan's."""
    models = ["actor"] if facts.train_actor else []
    if has_critic(spec):
        models.append("critic")
    return Step(
        id=f"ppo/{iteration}/step",
        stage=Stage.PPO,
        step=iteration,
        batch=f"ppo/{iteration}",
        **schedule(spec, plan, Stage.PPO, models, placed),
        kl_coef=facts.kl_coef,
        train_actor=facts.train_actor,
    )


def supervised_step(
    spec: RLHFJobSpec, plan: Plan, stage: Stage, step: int, placed: Mapping[str, Parallelism] | None = None
) -> Step:
    """The command of one SFT, reward or DPO step with the serial schedule. `placed` is that of `ppo_step`."""
    return Step(
        id=f"{stage.value}/{step}/step",
        stage=stage,
        step=step,
        batch=f"{stage.value}/{step}",
        **schedule(spec, plan, stage, [stage.model], placed),
    )
