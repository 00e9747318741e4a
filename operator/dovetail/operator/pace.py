"""How often a job's status is written: what is urgent at once, what comes by itself as pods start at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.operator import reasons
from dovetail.operator.store import Key

# The API server works longer on a status than on most objects of a job, as its rules are checked anew, and pods of one
# job become ready one by one within a moment: the status need not follow each.
STATUS_SECONDS = 2.0
STARTING_SECONDS = 10.0
STARTING = {reasons.CREATING, reasons.STARTING}
CALM = STARTING | {reasons.ALL_SCHEDULED, reasons.ALL_READY, reasons.PLANNED, reasons.NOT_SUSPENDED}
CALM |= {reasons.AS_EXPECTED, reasons.IN_PROGRESS, reasons.REPLANNED}


class Pace:
    """Of all jobs. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wrote: dict[Key, float] = {}

    def wait(self, key: Key, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
        """Seconds until the status that is wanted may be written over the known one: 0 for that of a new generation,
        and for every condition that changes otherwise than as a job starts well. A new job waits from the first call.
        """
        fresh = known and known.get("observedGeneration") != wanted.get("observedGeneration")
        if fresh or not _changed(known, wanted) <= CALM:
            return 0.0
        starting = known and any(c["type"] == "Running" and c["reason"] in STARTING for c in wanted["conditions"])
        due = self._wrote.setdefault(key, self._clock()) + (STARTING_SECONDS if starting else STATUS_SECONDS)
        return max(0.0, due - self._clock())

    def wrote(self, key: Key) -> None:
        self._wrote[key] = self._clock()

    def forget(self, key: Key) -> None:
        """The job is over, or gone."""
        self._wrote.pop(key, None)


def _changed(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> set[str]:
    """The reasons, old and new, of conditions that say something else than before."""
    old, new = (
        {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())} for status in (known, wanted)
    )
    return {reason for kind in new if old.get(kind) != new[kind] for _, reason in (old.get(kind, new[kind]), new[kind])}
