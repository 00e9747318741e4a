"""Shows RLHFJobs in the form of the API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from dovetail.kube.owners import controlled_by
from dovetail.manifest.status import RLHFJobStatus
from dovetail.statusapi.answers import Job, KubeEvent

# The first of these conditions that is True is the job's state.
_STATES = ("Completed", "Failed", "Suspended", "Running", "Scheduled", "Planned")
TERMINAL = ("Completed", "Failed")
EVENTS = 20
Object = dict[str, Any]


def status_of(manifest: Object) -> RLHFJobStatus:
    """The job's status. It is empty if somebody else wrote a status that does not fit."""
    try:
        return RLHFJobStatus.model_validate(manifest.get("status") or {})
    except ValidationError:
        return RLHFJobStatus()


def state_of(status: RLHFJobStatus) -> str:
    held = {condition.type for condition in status.conditions if condition.status == "True"}
    return next((state for state in _STATES if state in held), "Pending")


def job_line(manifest: Object) -> Job:
    metadata, status = manifest["metadata"], status_of(manifest)
    return Job(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        created=metadata["creationTimestamp"],
        state=state_of(status),
        stage=status.stage,
        iteration=status.iteration,
        iterations=status.iterations,
        reward=status.reward,
        kl=status.kl,
        samples_per_second=status.samples_per_second,
    )


def links(namespace: str, name: str) -> dict[str, str]:
    """The paths of one job's parts."""
    base = f"/api/v1/namespaces/{namespace}/{PATH}/{name}"
    return {part: f"{base}/{part}" for part in ("iterations", "plan", "events", "logs")}


PATH = "rlhfjobs"


def kube_events(events: Object) -> list[KubeEvent]:
    """The newest events of an EventList, newest first."""
    found = []
    for item in events.get("items", []):
        time = item.get("lastTimestamp") or item.get("eventTime") or item["metadata"].get("creationTimestamp")
        found.append(
            KubeEvent(
                time=time,
                type=item.get("type") or "Normal",
                reason=item.get("reason") or "",
                message=item.get("message") or "",
                count=item.get("count") or (item.get("series") or {}).get("count") or 1,
            )
        )
    return newest(found)


def newest(events: list[KubeEvent]) -> list[KubeEvent]:
    """The newest of these events, in order from the newest to the oldest."""
    return sorted(events, key=lambda event: event.time or datetime.min.replace(tzinfo=UTC), reverse=True)[:EVENTS]


def owned_by(job: Object, child: Object) -> bool:
    """Whether the RLHFJob controls the object. The name alone proves nothing."""
    return controlled_by(child, str(job["metadata"]["uid"]))
