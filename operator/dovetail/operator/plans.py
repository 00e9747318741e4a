"""A plan as the job's status tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.plan import Plan
from dovetail.api.status import PlanStatus, RLHFJobStatus
from dovetail.api.types import Parallelism
from dovetail.api.unexecuted import warnings
from dovetail.operator import progress, reasons
from dovetail.operator.conditions import Conditions
from dovetail.operator.render.context import Context, digest


def plan_status(plan: Plan) -> PlanStatus:
    return PlanStatus(
        placement=plan.prediction.placement if plan.prediction is not None else None,
        actor=_layout(plan.parallelism.get("actor")),
        critic=_layout(plan.parallelism.get("critic") or plan.parallelism.get("reward")),
        schedule=plan.schedule,
        hash=digest(plan.model_dump(mode="json", by_alias=True)),
    )


def say_planned(
    reported: Mapping[str, Any] | None, context: Context, conditions: Conditions, old: RLHFJobStatus
) -> None:
    """With the reason PlanOff while iterations take other times than the plan says."""
    told, was = summary(context), any(c.reason == reasons.PLAN_OFF for c in old.conditions)
    if reported is None and was:
        return  # the coordinator is away; what it said stays
    problem = progress.plan_problem(reported or {})
    if problem is None:
        conditions.set("Planned", True, reasons.PLANNED, told)
    else:
        conditions.set("Planned", True, reasons.PLAN_OFF, f"{problem} ({told})")


def summary(context: Context) -> str:
    """The plan in short, and what a user may not expect of it."""
    plan = context.plan
    return "; ".join(
        [
            f"{plan.world_size} trainer ranks, {len(plan.rollouts)} rollouts",
            *_predicted(plan),
            *plan.warnings,
            *(sentence.rstrip(".") for sentence in warnings(context.job.spec, cluster=True)),
        ]
    )


def _predicted(plan: Plan) -> list[str]:
    """The choice and the next best, each with its time or the number that failed."""
    found = plan.prediction
    if found is None:
        return []
    sentence = f"{found.placement}, {found.iteration_seconds:.3g} s an iteration predicted"
    if not found.alternatives:
        return [sentence]
    other = found.alternatives[0]
    why = f"{other.seconds:.3g} s" if other.seconds is not None else other.problem
    return [f"{sentence} ({other.placement}: {why})"]


def _layout(layout: Parallelism | None) -> str | None:
    return None if layout is None else f"pp{layout.pp} tp{layout.tp} dp{layout.dp}"
