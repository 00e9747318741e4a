"""Jobs that MultiKueue sends to other clusters. The operator makes their Workloads. Kueue does the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.owners import controlled_by
from dovetail.kube.resources import WORKLOAD
from dovetail.manifest.status import RLHFJobStatus
from dovetail.manifest.types import KIND
from dovetail.operator.cluster.classes import Classes
from dovetail.operator.cluster.client import Client
from dovetail.operator.cluster.object_cache import Key
from dovetail.operator.log import log
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import Children, Object, condition, deleting, is_true, parse_time
from dovetail.operator.reconcile.conditions import Conditions, JobEvent, state
from dovetail.operator.reconcile.queueing import LONGEST_MESSAGE
from dovetail.operator.reconcile.reconcile import (
    AGAIN_SECONDS,
    PlanRefused,
    Seen,
    is_over,
    old_status,
    reconcile,
    refused,
    tries_again,
)
from dovetail.operator.reconcile.refusals import taken
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import workload

# Workloads are not watched.
LOOK_SECONDS = 30.0
# Kueue ends the Workload of a job that is over, and copies the job's status. It has this many seconds for both.
END_SECONDS = 10.0
# The reasons why Kueue ends a Workload whose job has ended, and the job's condition for each.
SUCCEEDED, FAILED = "Succeeded", "Failed"


class Looked(NamedTuple):
    """The events to record for the job, and the seconds until it must be looked at again. None if only a change needs a
    look."""

    events: list[JobEvent]
    again: float | None


class Dispatch:
    """Handles jobs that MultiKueue sends to other clusters. Kueue copies the status of such a job from the other
    cluster. Problems here become Events, one for each generation of the job. The operator writes the status only when
    Kueue does not. These are the cases that the job is tried again, and that Kueue has ended its Workload without
    copying its end. `now` returns the time of day."""

    def __init__(
        self,
        client: Client,
        planner: Planner,
        settings: OperatorSettings,
        classes: Classes,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._planner = planner
        self._settings = settings
        self._classes = classes
        self._now = now
        self._told: dict[Key, tuple[str, int]] = {}  # uid and generation

    def sends(self, document: Object) -> bool:
        """Whether MultiKueue sends the job to another cluster."""
        if not self._settings.multi_kueue or deleting(document):
            return False
        queue = (document["metadata"].get("labels") or {}).get(names.QUEUE_LABEL)
        return queue is not None and (document.get("spec") or {}).get("managedBy") == names.MULTIKUEUE

    async def look(self, key: Key, document: Object) -> Looked:
        """Make the Workload of a job that `sends`, or remove it. A suspended job has no Workload. A job that was
        evicted enters the queue again, and so does a failed job that its user tries again. When a Workload is removed,
        Kueue ends the job in the other cluster. Raises KubeError."""
        metadata, status = document["metadata"], old_status(document)
        uid, name = str(metadata["uid"]), names.workload(metadata["name"], str(metadata["uid"]))
        there = await self._client.find(WORKLOAD.kind, metadata["namespace"], name)
        if there is not None and not controlled_by(there, uid):
            return self._once(key, document, reasons.NAME_CONFLICT, taken([(WORKLOAD.kind, name)]))
        if tries_again(document, status):
            if there is None:
                return await self._try_again(document)
            await self._remove(key, there, "the job is tried again")
            return Looked([], AGAIN_SECONDS)
        if is_over(status):
            return await self._after_the_end(key, document, status, there)
        suspended = bool((document.get("spec") or {}).get("suspend"))
        if there is not None and deleting(there):
            return Looked([], AGAIN_SECONDS)
        if there is not None:
            if suspended or is_true(there, "Evicted"):
                await self._remove(key, there, "the job is suspended" if suspended else "Kueue has evicted it")
                return Looked([], LOOK_SECONDS if suspended else AGAIN_SECONDS)
            return await self._ended(key, document, status, there)
        if suspended:
            return Looked([], LOOK_SECONDS)
        planned = await self._planner.planned(document, Children())
        if isinstance(planned, PlanRefused):
            if planned.reason == reasons.PLANNING:
                return Looked([], LOOK_SECONDS)
            return self._once(key, document, planned.reason, planned.message)
        job_class = self._classes.of(planned[0])
        if (problem := refused(planned[0], job_class, self._settings)) is not None:
            return self._once(key, document, problem.reason, problem.message)
        usable = None if isinstance(job_class, PlanRefused) else job_class
        context = RenderContext(planned[0], uid, planned[1], self._settings, job_class=usable)
        try:
            await self._client.create(workload(context))
        except KubeError as error:
            if error.status == 404:
                raise KubeError(404, f"the cluster has no {WORKLOAD.kind} of Kueue; install Kueue") from error
            raise
        log("object.created", job="/".join(key), object=f"{WORKLOAD.kind}/{name}", reason="MultiKueue sends the job")
        return Looked([], LOOK_SECONDS)

    def forget(self, key: Key) -> None:
        """Drop a job that is gone, or that MultiKueue does not send."""
        self._told.pop(key, None)

    async def _try_again(self, document: Object) -> Looked:
        """Remove the end from the job's status, as for a job of this cluster."""
        nothing = PlanRefused(reasons.NOT_PLANNED, "")
        result = reconcile(Seen(document, nothing, Children(), settings=self._settings), self._now())
        await self._write(document, result.status)
        return Looked(result.events, AGAIN_SECONDS)

    async def _after_the_end(self, key: Key, document: Object, status: RLHFJobStatus, there: Object | None) -> Looked:
        """End the Workload of a job that is over. If the operator ended the job, its JobSet ends only now. Delete the
        job when its time is up."""
        since = status.completion_time or self._now()
        if there is not None and not is_true(there, "Finished"):
            if (left := self._left(since, END_SECONDS)) > 0:
                return Looked([], left)
            await self._remove(key, there, "the job is over")
            return Looked([], LOOK_SECONDS)
        ttl = (document.get("spec") or {}).get("ttlSecondsAfterFinished")
        if ttl is None or status.completion_time is None:
            return Looked([], None)
        if (left := self._left(since, float(ttl))) > 0:
            return Looked([], left)
        log("job.expired", job="/".join(key), reason="spec.ttlSecondsAfterFinished have passed")
        await self._client.delete(KIND, key[0], key[1], str(document["metadata"]["uid"]))
        return Looked([], LOOK_SECONDS)

    async def _ended(self, key: Key, document: Object, status: RLHFJobStatus, there: Object) -> Looked:
        """Look at the Workload of a job that is not over according to its status."""
        found = condition(there, "Finished") or {}
        if found.get("status") != "True":
            return Looked([], LOOK_SECONDS)
        reason, said = str(found.get("reason")), str(found.get("message"))[:LONGEST_MESSAGE]
        if reason not in (SUCCEEDED, FAILED):
            problem = "Kueue has ended the job's Workload, so the job does not run in another cluster"
            return self._once(key, document, reasons.WORKLOAD_ENDED, f"{problem} ({reason}: {said})")
        if (left := self._left(parse_time(found.get("lastTransitionTime")) or self._now(), END_SECONDS)) > 0:
            return Looked([], left)
        # The copy is gone, with what its status said last.
        conditions = Conditions(status.conditions, int(document["metadata"].get("generation", 0)), self._now())
        told = f"the job ended in another cluster, and Kueue has not copied its last status: {said}"
        if reason == SUCCEEDED:
            conditions.set("Completed", True, reasons.COMPLETED, told)
        else:
            conditions.set("Completed", False, reasons.FINISHED)
            conditions.set("Failed", True, reasons.JOBSET_FAILED, told)
        conditions.set("Running", False, reasons.FINISHED)
        ended = {"completion_time": self._now().replace(microsecond=0), "conditions": conditions.result()}
        await self._write(document, status.model_copy(update=ended))
        return Looked(conditions.events(), LOOK_SECONDS)

    async def _remove(self, key: Key, there: Object, why: str) -> None:
        metadata = there["metadata"]
        if deleting(there):
            return
        await self._client.delete(WORKLOAD.kind, key[0], str(metadata["name"]), str(metadata["uid"]))
        log("object.deleted", job="/".join(key), object=f"{WORKLOAD.kind}/{metadata['name']}", reason=why)

    async def _write(self, document: Object, status: RLHFJobStatus) -> None:
        status = status.model_copy(update={"state": state(status.conditions)})
        await self._client.write_status(document, json.loads(status.model_dump_json(by_alias=True, exclude_none=True)))

    def _left(self, since: datetime, seconds: float) -> float:
        """The seconds that are left of `seconds` since `since`, but at most a day."""
        return min(seconds - (self._now() - since).total_seconds(), 86400.0)

    def _once(self, key: Key, document: Object, reason: str, message: str) -> Looked:
        now = str(document["metadata"]["uid"]), int(document["metadata"].get("generation", 0))
        if self._told.get(key) == now:
            return Looked([], LOOK_SECONDS)
        self._told[key] = now
        return Looked([JobEvent("Warning", reason, message)], LOOK_SECONDS)
