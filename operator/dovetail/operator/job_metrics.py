"""Prometheus series about single jobs. They disappear with the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.manifest.status import RLHFJobStatus
from dovetail.operator.reconcile import reasons

# This reason is only in metrics. The job waits for GPUs that no node has, because they are mistyped or not added yet.
NO_NODE_FITS = "NoNodeFits"
# This reason is only in metrics. The job waits for GPUs, and the operator may not see whether any node has them.
NODES_UNKNOWN = "NodesUnknown"
# What a job does with the GPUs that it holds.
WORKING, IDLE = "working", "idle"
Key = tuple[str, str]  # namespace and name of an RLHFJob
# The job's reason is that of the first of these that is true. If none is true, it is that of the first of WAITS that is
# false.
_HOLDS = ("Completed", "Failed", "Suspended")
_WAITS = ("Planned", "Scheduled", "Running")


@dataclass
class _Job:
    """The waiting times of a job. `pending` has the reason why the job does not run although it should, and since when.
    `seconds` has the earlier waiting time by reason."""

    state: str
    reason: str
    stage: str
    iteration: int | None
    pending: tuple[str, float] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def waited(self, now: float) -> dict[str, float]:
        """Seconds by reason until now."""
        found = dict(self.seconds)
        if self.pending is not None:
            reason, since = self.pending
            found[reason] = found.get(reason, 0.0) + now - since
        return found


@dataclass
class _Held:
    """The GPUs that a job's pods have on nodes, by product. `use` says whether all its pods work. `seconds` has the
    GPU seconds until `since`, by queue, product and use."""

    queue: str
    gpus: Mapping[str, int]
    use: str
    since: float
    seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def held(self, now: float) -> dict[tuple[str, str, str], float]:
        """GPU seconds until now."""
        found = dict(self.seconds)
        for product, number in self.gpus.items():
            place = self.queue, product, self.use
            found[place] = found.get(place, 0.0) + number * (now - self.since)
        return found


class JobMetrics(Collector):
    """The metrics of each job, taken from its status. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[Key, _Job] = {}
        self._held: dict[Key, _Held] = {}
        self._unfit: dict[Key, str] = {}  # the reason that replaces UNSCHEDULABLE for a job

    def fits(self, key: Key, fits: bool | None) -> None:
        """Record whether the nodes have room for the job while nothing else runs. `fits` is None if that is not
        known."""
        if fits:
            self._unfit.pop(key, None)
        else:
            self._unfit[key] = NODES_UNKNOWN if fits is None else NO_NODE_FITS

    def look(self, key: Key, status: RLHFJobStatus) -> None:
        """Update the metrics from a job's status."""
        now, before = self._clock(), self._jobs.get(key)
        reason, waits = _reason(status)
        if reason == reasons.UNSCHEDULABLE:
            reason = self._unfit.get(key, reason)
        found = _Job(status.state or "Pending", reason, status.stage or "", status.iteration)
        if before is not None:
            found.seconds = before.waited(now)
        if waits:
            found.pending = reason, now
        self._jobs[key] = found

    def hold(self, key: Key, queue: str, gpus: Mapping[str, int], works: bool) -> None:
        """Record the GPUs that a job's pods have now, by product. A job that does not work, because it starts or lacks
        a pod, holds them all the same."""
        now, before = self._clock(), self._held.get(key)
        if before is not None or gpus:
            earlier = before.held(now) if before is not None else {}
            self._held[key] = _Held(queue, gpus, WORKING if works else IDLE, now, earlier)

    def forget(self, key: Key) -> bool:
        """Drop a job. Returns whether it was known."""
        self._unfit.pop(key, None)
        self._held.pop(key, None)
        return self._jobs.pop(key, None) is not None

    def clear(self) -> None:
        """Forget all jobs, because another replica shows them."""
        self._jobs.clear()
        self._unfit.clear()
        self._held.clear()

    def collect(self) -> Iterator[Metric]:
        names = ["namespace", "rlhfjob"]
        states = GaugeMetricFamily(
            "dovetail_job_state", "1 for the job's state and the reason for it.", labels=[*names, "state", "reason"]
        )
        iterations = GaugeMetricFamily(
            "dovetail_job_iteration", "Finished iterations, or steps, of the stage.", labels=[*names, "stage"]
        )
        pending = CounterMetricFamily(
            "dovetail_job_pending_seconds",
            "Time in which the job wanted to run and did not, since this replica leads.",
            labels=[*names, "reason"],
        )
        now = self._clock()
        for key, job in sorted(self._jobs.items()):
            states.add_metric([*key, job.state, job.reason], 1)
            if job.iteration is not None and job.stage:
                iterations.add_metric([*key, job.stage], job.iteration)
            for reason, seconds in sorted(job.waited(now).items()):
                pending.add_metric([*key, reason], seconds)
        gpus = CounterMetricFamily(
            "dovetail_job_gpu_seconds",
            "GPUs of the job's pods on nodes, times seconds, since this replica leads.",
            labels=[*names, "queue", "product", "use"],
        )
        for key, held in sorted(self._held.items()):
            for place, seconds in sorted(held.held(now).items()):
                gpus.add_metric([*key, *place], seconds)
        yield from (states, iterations, pending, gpus)


def _reason(status: RLHFJobStatus) -> tuple[str, bool]:
    """The reason of the job's state, and whether the job waits to run."""
    held = {c.type: c for c in status.conditions}
    for kind in _HOLDS:
        if kind in held and held[kind].status == "True":
            return held[kind].reason, held[kind].reason == reasons.QUEUED
    for kind in _WAITS:
        if kind in held and held[kind].status == "False":
            return held[kind].reason, True
    return (held["Running"].reason, False) if "Running" in held else (reasons.IN_PROGRESS, True)
