"""Makes the sentences of a job's status when its objects cannot be made, also because of another job's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import VOLUME_CLAIM
from dovetail.manifest.status import RLHFJobStatus
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import Object
from dovetail.operator.reconcile.conditions import Conditions, JobEvent
from dovetail.protocol.process.process_names import COORDINATOR


def taken(things: Sequence[tuple[str, str]]) -> str:
    """The sentence for names that the job needs and other objects have. `things` has kind and name of each."""
    claimed = any(kind == VOLUME_CLAIM.kind for kind, _ in things)
    use = " To use the claim, name it in spec.checkpoint.volume." if claimed else ""
    them = " and ".join(f"{kind} {name}" for kind, name in things)
    if len(things) > 1:
        told = f"{them} exist and do not belong to this job, so the operator leaves them alone. Delete or rename them"
    else:
        told = f"{them} exists and does not belong to this job, so the operator leaves it alone. Delete or rename it"
    return f"{told}, or give the job another name.{use}"


def started_anew(claim: Mapping[str, Any]) -> JobEvent | None:
    """The event for a claim of an earlier job that this job uses, if the manifest names no folder. None if there was no
    earlier job."""
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
    """The sentence for a Secret that claims to be the job's token, but was not made by the operator."""
    return f"Secret {name} names this job as its owner, but the operator did not make it. Delete it."


def left_over(kind: str, name: str, pods: Sequence[str] = ()) -> str:
    """The sentence for an object of an earlier job with the same name that is not deleted yet. `pods`: the names of the
    pods that it waits for."""
    said = f"the job waits until {kind} {name} of an earlier job with this name is deleted"
    if not pods:
        return said
    return f"{said}; it stays until pod {pods[0]} has ended; if that pod's node is gone, delete the pod with --force"


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
    """The status and events of a job that lacks an object. `old` is the status before. `status` and `events` are those
    without this problem. A job that has started goes on."""
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


def parts(document: Object) -> list[str]:
    """The parts of the names of an RLHFJob's Jobs that follow its own name."""
    groups = (document.get("spec") or {}).get("groups") or []
    return [COORDINATOR, *(str(group.get("name")) for group in groups)]


def shared(document: Object, find: Callable[[str], Object | None], started: Callable[[str], bool]) -> str | None:
    """A sentence if another RLHFJob has the names that this one needs. None if the names are free. `find` returns an
    RLHFJob of the same namespace by its name. `started` says whether a job has a JobSet. Of two jobs without a JobSet
    the older one comes first.

    A group's Jobs are named after the RLHFJob and the group. So job `a-b` with group `c` and job `a` with group `b-c`
    would both have a Job `a-b-c-0`."""
    name = str(document["metadata"]["name"])
    for part in parts(document):
        words = f"{name}-{part}".split("-")
        for at in range(1, len(words)):
            other, theirs = "-".join(words[:at]), "-".join(words[at:])
            there = find(other) if other != name else None
            if there is None or theirs not in parts(there):
                continue
            if started(other) or _age(there) < _age(document):
                return (
                    f"Jobs of group {part} would have the names of the Jobs of RLHFJob {other}, group {theirs} "
                    f"({name}-{part}-0). Delete this job, and create it with another name of the job or of the group."
                )
    return None


def _age(document: Object) -> tuple[str, str]:
    metadata = document["metadata"]
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("uid"))
