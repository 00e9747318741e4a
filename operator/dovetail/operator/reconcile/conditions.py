"""A job's conditions. It finds which have changed, and since when they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from dovetail.manifest.status import Condition, ConditionType, RLHFJobStatus
from dovetail.operator.reconcile import reasons

ORDER: tuple[ConditionType, ...] = (
    "Planned",
    "Suspended",
    "Scheduled",
    "Running",
    "Degraded",
    "Disrupted",
    "Healthy",
    "Completed",
    "Failed",
)
# These reasons are worth an event when they appear. Other reasons come and go in every job within seconds.
QUIET = {reasons.IN_PROGRESS, reasons.CREATING, reasons.STARTING, reasons.NOT_PLANNED, reasons.STOPPED}
QUIET |= {reasons.PLANNING}
# Events of new plans are recorded elsewhere (`plans.publish`).
QUIET |= {reasons.FINISHED, reasons.AS_EXPECTED, reasons.NOT_SUSPENDED, reasons.REPLANNED, reasons.HEALTHY}
GOOD = {reasons.PLANNED, reasons.SUSPENDED, reasons.QUEUED, reasons.ALL_SCHEDULED, reasons.ALL_READY, reasons.COMPLETED}
GOOD |= {reasons.TRIED_AGAIN}
LONGEST_MESSAGE = 2000


@dataclass(frozen=True)
class JobEvent:
    """A Kubernetes Event to record."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def state(conditions: Sequence[Condition]) -> str:
    """The job's state in one word. It is the first of these conditions that is true."""
    held = {c.type for c in conditions if c.status == "True"}
    states = ("Completed", "Failed", "Suspended", "Running", "Scheduled", "Planned")
    return next((each for each in states if each in held), "Pending")


def why_deleted(status: RLHFJobStatus) -> str:
    """The reason why a job with this status loses pods."""
    held = {c.type: c for c in status.conditions}
    for kind in ("Completed", "Failed", "Suspended"):
        if kind in held and held[kind].status == "True":
            return f"{held[kind].reason}: {held[kind].message}"
    running = held.get("Running")
    told = running.message if running is not None and running.status == "False" else ""
    return told or "the job wants fewer pods"


class Conditions:
    """Collects the conditions of one reconciliation on top of the last ones."""

    def __init__(self, old: Sequence[Condition], generation: int, now: datetime) -> None:
        self._old = {c.type: c for c in old}
        self._new: dict[ConditionType, Condition] = {}
        self._generation = generation
        self._now = now.replace(microsecond=0)
        self._told: list[JobEvent] = []

    def set(self, kind: ConditionType, status: bool, reason: str, message: str = "") -> None:
        """Set one condition. The time of the last transition changes only with the status."""
        said: Literal["True", "False"] = "True" if status else "False"
        old = self._old.get(kind)
        since = old.last_transition_time if old is not None and old.status == said else self._now
        self._new[kind] = Condition(
            type=kind,
            status=said,
            observed_generation=self._generation,
            last_transition_time=since,
            reason=reason,
            message=message[:LONGEST_MESSAGE],
        )

    def is_true(self, kind: ConditionType) -> bool:
        """Whether the condition is true. If it was not set now, its earlier status counts."""
        found = self._new.get(kind) or self._old.get(kind)
        return found is not None and found.status == "True"

    def tell(self, event: JobEvent) -> None:
        """Add an event. Conditions with a new reason have events of their own."""
        self._told.append(event)

    def result(self) -> list[Condition]:
        """The conditions in a fixed order. Those that were not set stay as they were."""
        merged = self._old | self._new
        return [merged[kind] for kind in ORDER if kind in merged]

    def events(self) -> list[JobEvent]:
        """The added events, and one for each condition with a new status or reason and a message."""
        found = list(self._told)
        for kind in ORDER:
            new, old = self._new.get(kind), self._old.get(kind)
            if new is None or new.reason in QUIET or (old and (old.status, old.reason) == (new.status, new.reason)):
                continue
            good = new.reason in GOOD
            found.append(JobEvent("Normal" if good else "Warning", new.reason, new.message or new.reason))
        if any(event.reason == reasons.ALL_READY for event in found):
            found = [event for event in found if event.reason != reasons.ALL_SCHEDULED]
        # Failed and Degraded often say the same.
        return list({(e.reason, e.message): e for e in found}.values())
