"""Shows a plan in the job's status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.manifest.checks.validation import warnings
from dovetail.manifest.status import PlanStatus, RLHFJobStatus
from dovetail.manifest.types import Parallelism
from dovetail.operator.reconcile import progress, reasons
from dovetail.operator.reconcile.conditions import Conditions, JobEvent
from dovetail.operator.reconcile.replan import Outlook, needs, news, remembered
from dovetail.operator.render.context import RenderContext, digest
from dovetail.operator.render.pod import given_template
from dovetail.protocol.plan import Plan
from dovetail.protocol.prediction import too_small


def plan_status(plan: Plan, shown: Plan) -> PlanStatus:
    """The plan in the job's status. `plan` is the plan that runs. `shown` is the plan with as many rollouts as the
    nodes have room for."""
    layouts = {**plan.parallelism, **plan.dedicated}
    return PlanStatus(
        placement=shown.prediction.placement if shown.prediction is not None else None,
        actor=_layout(layouts.get("actor")),
        critic=_layout(layouts.get("critic") or layouts.get("reward")),
        schedule=plan.schedule,
        rollouts=len(shown.rollouts),
        # This is the hash of the ConfigMap's content, because the plan is read from there later.
        hash=digest(plan.model_dump(mode="json", by_alias=True, exclude={"stages"})),
    )


def publish(
    context: RenderContext,
    conditions: Conditions,
    old: RLHFJobStatus,
    reported: Mapping[str, Any] | None,
    outlook: Outlook,
    config_map: Mapping[str, Any] | None,
    class_news: str = "",
) -> PlanStatus | None:
    """The plan in the status, and the condition Planned. Its reason is PlanOff while iterations take other times than
    the plan says, and Replanned while the nodes have other room than when the plan was made. `config_map` is the plan's
    ConfigMap, for a job that has started. `class_news` is what has become of the job's class since."""
    before = next((c for c in old.conditions if c.type == "Planned" and c.status == "True"), None)
    if outlook.pending and before is not None and old.plan is not None:
        return old.plan  # it stays until the new plan is there
    then = outlook.room if config_map is None else remembered(config_map)
    told = news(needs(context), then, outlook.room)
    fresh = told.changed and (before is None or told.sentence not in before.message)
    if fresh:
        conditions.tell(JobEvent("Warning" if told.short else "Normal", reasons.REPLANNED, told.sentence))
    shown = plan_status(context.plan, outlook.plan or context.plan)
    if reported is None and before is not None and before.reason == reasons.PLAN_OFF and not fresh:
        return shown  # the coordinator is away, so its last report stays
    problem = progress.plan_problem(reported or {})
    said = "; ".join(filter(None, (told.sentence, class_news, summary(context, outlook))))
    if problem is not None:
        conditions.set("Planned", True, reasons.PLAN_OFF, f"{problem} ({said})")
    else:
        conditions.set("Planned", True, reasons.REPLANNED if told.changed else reasons.PLANNED, said)
    return shown


def summary(context: RenderContext, outlook: Outlook) -> str:
    """A summary of the plan, with what may surprise the user."""
    plan = outlook.plan or context.plan
    parts = [f"{plan.world_size} trainer ranks, {len(plan.rollouts)} rollouts", *_predicted(plan)]
    if outlook.problem is not None:
        parts.append(f"the planner has no plan for the GPUs that there are now: {outlook.problem}")
    spec = context.job.spec
    templates = {group.name: given_template(context, group) for group in spec.groups}
    parts += [
        *plan.warnings,
        *too_small(plan.memory, templates),
        *(sentence.rstrip(".") for sentence in warnings(spec, cluster=True)),
    ]
    if outlook.refused:
        parts.append("the plan does not follow the inventory: the operator may not list nodes")
    return "; ".join(parts)


def _predicted(plan: Plan) -> list[str]:
    """The chosen placement and the next best one, each with its time or with the limit that it breaks."""
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
    if layout is None:
        return None
    shared = "".join(f" {name}{count}" for name, count in (("cp", layout.cp), ("ep", layout.ep)) if count > 1)
    return f"pp{layout.pp} tp{layout.tp} dp{layout.dp}{shared}"
