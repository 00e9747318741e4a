"""What a job's status says when its objects cannot be made. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import VOLUME_CLAIM
from dovetail.manifest.status import RLHFJobStatus
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.conditions import Conditions, JobEvent


def taken(things: Sequence[tuple[str, str]]) -> str:
    """Objects with names that the job needs are not the job's. `things`: kind and name of each."""
    claimed = any(kind == VOLUME_CLAIM.kind for kind, _ in things)
    use = " To use the claim, name it in spec.checkpoint.volume." if claimed else ""
    them = " and ".join(f"{kind} {name}" for kind, name in things)
    if len(things) > 1:
        told = f"{them} exist and do not belong to this job, so the operator leaves them alone. Delete or rename them"
    else:
        told = f"{them} exists and does not belong to this job, so the operator leaves it alone. Delete or rename it"
    return f"{told}, or give the job another name.{use}"


def started_anew(claim: Mapping[str, Any]) -> JobEvent | None:
    """What to tell of a claim that was kept of an earlier job, and that a job has taken up which names no folder. None
    if there was no earlier job."""
    metadata = claim["metadata"]
    told = metadata.get("annotations") or {}
    earlier = told.get(names.EARLIER_FOLDERS)
    if not earlier:
        return None
    return JobEvent(
        "Normal",
        reasons.STARTED_ANEW,
        f"PersistentVolumeClaim {metadata['name']} was kept of an earlier job with this name. This job starts anew, in "
        f"the folder {told.get(names.FOLDER)} of the claim. Folders of earlier jobs stay: {earlier}. To go on with one "
        f"of these runs, delete this job and name the folder in spec.storage.folder.",
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
