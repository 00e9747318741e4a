"""Limits how often a job's status is written. Urgent news is written at once. The progress of starting pods is written
at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.operator.cluster.object_cache import Key
from dovetail.operator.reconcile import reasons

# The API server works longer on a status than on most objects of a job, because it checks the rules again. Pods of one
# job become ready one by one within a moment, and the status need not follow each.
STATUS_SECONDS = 2.0
STARTING_SECONDS = 10.0
# If many jobs start at once, most of them run before their turn comes. Then one status is enough.
STARTS_AT_ONCE, STARTS_PER_SECOND = 10, 0.2
LONGEST_SECONDS = 60.0
# When all pods are ready, the coordinator will soon report its progress for the first time.
READY_SECONDS = 1.0
STARTING = {reasons.CREATING, reasons.STARTING}
CALM = STARTING | {reasons.ALL_SCHEDULED, reasons.ALL_READY, reasons.PLANNED, reasons.NOT_SUSPENDED}
CALM |= {reasons.AS_EXPECTED, reasons.IN_PROGRESS, reasons.REPLANNED, reasons.PLANNING, reasons.NOT_PLANNED}


class StatusRate:
    """The rate for all jobs. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wrote: dict[Key, float] = {}
        self._turns: dict[Key, float] = {}
        self._next_turn = 0.0
        self._ready: dict[Key, float] = {}

    def wait(self, key: Key, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
        """The seconds until the wanted status may replace the known one. A status of a new generation need not wait.
        One with a condition that changes for another reason than a good start need not wait either. A new job waits
        from the first call. Jobs that start well also wait for each other."""
        fresh = known and known.get("observedGeneration") != wanted.get("observedGeneration")
        if fresh or not _changed(known, wanted) <= CALM:
            return 0.0
        starting = any(c["type"] == "Running" and c["reason"] in STARTING for c in wanted["conditions"])
        ready = reasons.ALL_READY in _changed(known, wanted)
        pause = STARTING_SECONDS if starting and known else STATUS_SECONDS
        due = self._wrote.setdefault(key, self._clock()) + pause
        if starting:
            due = max(due, self._turn(key))
        elif ready:
            due = max(due, self._ready.setdefault(key, self._clock()) + READY_SECONDS)
        return max(0.0, due - self._clock())

    def wrote(self, key: Key) -> None:
        self._wrote[key] = self._clock()
        self._turns.pop(key, None)
        self._ready.pop(key, None)

    def forget(self, key: Key) -> None:
        """Drop a job that is over or deleted."""
        self._wrote.pop(key, None)
        self._turns.pop(key, None)
        self._ready.pop(key, None)

    def _turn(self, key: Key) -> float:
        """The time when the status of this starting job may be written, from a token bucket."""
        if key not in self._turns:
            now = self._clock()
            self._next_turn = max(self._next_turn, now) + 1 / STARTS_PER_SECOND
            turn = self._next_turn - STARTS_AT_ONCE / STARTS_PER_SECOND
            self._turns[key] = min(turn, now + LONGEST_SECONDS)
        return self._turns[key]


def _changed(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> set[str]:
    """The old and new reasons of the conditions that have changed."""
    old, new = (
        {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())} for status in (known, wanted)
    )
    return {reason for kind in new if old.get(kind) != new[kind] for _, reason in (old.get(kind, new[kind]), new[kind])}
