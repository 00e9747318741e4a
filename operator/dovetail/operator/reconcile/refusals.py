"""What a job's status says when its objects cannot be made. Pure."""

from __future__ import annotations

from datetime import datetime

from dovetail.kube.resources import VOLUME_CLAIM
from dovetail.manifest.status import RLHFJobStatus
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.conditions import Conditions, JobEvent


def taken(kind: str, name: str) -> str:
    """An object with a name that the job needs is not the job's."""
    use = " To use the claim, name it in spec.checkpoint.volume." if kind == VOLUME_CLAIM.kind else ""
    return (
        f"{kind} {name} exists and does not belong to this job, so the operator leaves it alone. "
        f"Delete or rename it, or give the job another name.{use}"
    )


def forged(name: str) -> str:
    """A Secret with a token says that it is the job's, but the operator did not make it."""
    return f"Secret {name} names this job as its owner, but the operator did not make it. Delete it."


def left_over(kind: str, name: str) -> str:
    """An object of an earlier job with the same name is not deleted yet."""
    return f"the job waits until {kind} {name} of an earlier job with this name is deleted"


def held_up(
    old: RLHFJobStatus,
    status: RLHFJobStatus,
    events: list[JobEvent],
    reason: str,
    problem: str,
    *,
    started: bool,
    generation: int,
    now: datetime,
) -> tuple[RLHFJobStatus, list[JobEvent]]:
    """The status and events of a job that lacks an object. `old`: the status before; `status` and `events`: what there
    would be to tell otherwise. A job that has started goes on as well as it can."""
    conditions = Conditions(old.conditions, generation, now)
    for told in status.conditions:
        conditions.set(told.type, told.status == "True", told.reason, told.message)
    if started:
        conditions.set("Degraded", True, reason, problem)
    else:
        conditions.set("Scheduled", False, reason, problem)
        conditions.set("Running", False, reason, problem)
    replanned = [event for event in events if event.reason == reasons.REPLANNED]
    return status.model_copy(update={"conditions": conditions.result()}), [*replanned, *conditions.events()]
