"""Jobs that MultiKueue sends to other clusters: the operator makes their Workloads, and leaves all else to Kueue."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.owners import controlled_by
from dovetail.kube.resources import WORKLOAD
from dovetail.operator.cluster.client import Client
from dovetail.operator.cluster.object_cache import Key
from dovetail.operator.log import log
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import Children, Object, condition, deleting, is_true
from dovetail.operator.reconcile.conditions import JobEvent
from dovetail.operator.reconcile.queueing import LONGEST_MESSAGE
from dovetail.operator.reconcile.reconcile import PlanRefused, is_over, old_status
from dovetail.operator.reconcile.refusals import taken
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.sent_workload import workload

# Workloads are not watched.
LOOK_SECONDS = 30.0
# Why Kueue ends a Workload whose job has ended. The job's status may come a moment later.
WITH_ITS_JOB = frozenset({"Succeeded", "Failed"})


class Dispatch:
    """The status of such a job is MultiKueue's, so problems become Events, one for each generation of the job."""

    def __init__(self, client: Client, planner: Planner, settings: OperatorSettings) -> None:
        self._client = client
        self._planner = planner
        self._settings = settings
        self._told: dict[Key, tuple[str, int]] = {}  # uid and generation

    def sends(self, document: Object) -> bool:
        """Whether the job is MultiKueue's, and has not ended."""
        if not self._settings.multi_kueue or deleting(document) or is_over(old_status(document)):
            return False
        queue = (document["metadata"].get("labels") or {}).get(names.QUEUE_LABEL)
        return queue is not None and (document.get("spec") or {}).get("managedBy") == names.MULTIKUEUE

    async def look(self, key: Key, document: Object) -> JobEvent | None:
        """Make the Workload of a job that `sends`, or remove it: a suspended job has none, and one that was evicted
        enters the queue anew. When a Workload goes, Kueue ends the job in the other cluster. Returns what is to be told
        of the job. Raises KubeError."""
        metadata = document["metadata"]
        uid, name = str(metadata["uid"]), names.workload(metadata["name"], str(metadata["uid"]))
        there = await self._find(metadata["namespace"], name)
        if there is not None and not controlled_by(there, uid):
            return self._once(key, document, reasons.NAME_CONFLICT, taken([(WORKLOAD.kind, name)]))
        suspended = bool((document.get("spec") or {}).get("suspend"))
        if there is not None:
            if (suspended or is_true(there, "Evicted")) and not deleting(there):
                await self._client.delete(WORKLOAD.kind, key[0], name, str(there["metadata"]["uid"]))
                why = "the job is suspended" if suspended else "Kueue has evicted it"
                log("object.deleted", job="/".join(key), object=f"{WORKLOAD.kind}/{name}", reason=why)
            elif (problem := _ended(there)) is not None:
                return self._once(key, document, reasons.WORKLOAD_ENDED, problem)
            return None
        if suspended:
            return None
        planned = await self._planner.planned(document, Children())
        if isinstance(planned, PlanRefused):
            return self._once(key, document, planned.reason, planned.message)
        try:
            await self._client.create(workload(RenderContext(planned[0], uid, planned[1], self._settings)))
        except KubeError as error:
            if error.status == 404:
                raise KubeError(404, f"the cluster has no {WORKLOAD.kind} of Kueue; install Kueue") from error
            raise
        log("object.created", job="/".join(key), object=f"{WORKLOAD.kind}/{name}", reason="MultiKueue sends the job")
        return None

    def forget(self, key: Key) -> None:
        """The job is gone, or not MultiKueue's."""
        self._told.pop(key, None)

    async def _find(self, namespace: str, name: str) -> Object | None:
        try:
            return await self._client.get(WORKLOAD, namespace, name)
        except KubeError as error:
            if error.status != 404:
                raise
            return None

    def _once(self, key: Key, document: Object, reason: str, message: str) -> JobEvent | None:
        now = str(document["metadata"]["uid"]), int(document["metadata"].get("generation", 0))
        if self._told.get(key) == now:
            return None
        self._told[key] = now
        return JobEvent("Warning", reason, message)


def _ended(there: Object) -> str | None:
    """Why Kueue has ended the Workload of a job that goes on; None if it has not."""
    found = condition(there, "Finished") or {}
    if found.get("status") != "True" or found.get("reason") in WITH_ITS_JOB:
        return None
    said = f"{found.get('reason')}: {found.get('message')}"[:LONGEST_MESSAGE]
    return f"Kueue has ended the job's Workload, so the job does not run in another cluster ({said})"
