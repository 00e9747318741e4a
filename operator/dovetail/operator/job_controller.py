"""Does what `reconcile` decides, with one worker at a time for each job, while this replica leads."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.owners import controller, left_by
from dovetail.kube.resources import (
    CHILDREN,
    JOB,
    JOBSET,
    POD,
    POD_GROUPS,
    RLHFJOB,
    RLHFJOB_CLASS,
    ROLE,
    ROLE_BINDING,
    SANDBOX,
    VOLUME_CLAIM,
    Resource,
)
from dovetail.manifest.job_class import RLHFJobClass
from dovetail.manifest.status import RLHFJobStatus
from dovetail.manifest.types import KIND, RLHFJob
from dovetail.operator.cluster import own_objects
from dovetail.operator.cluster.child_watch import follow
from dovetail.operator.cluster.classes import Classes
from dovetail.operator.cluster.client import Client
from dovetail.operator.cluster.coordinator_poller import CoordinatorPoller
from dovetail.operator.cluster.gpu_nodes import Nodes
from dovetail.operator.cluster.mounts import Mounts
from dovetail.operator.cluster.multikueue import Dispatch
from dovetail.operator.cluster.notices import Notices
from dovetail.operator.cluster.object_cache import Key, ObjectCache, key_of
from dovetail.operator.cluster.own_objects import NO_SANDBOX, KindMissing, NameTaken
from dovetail.operator.cluster.tokens import Tokens
from dovetail.operator.log import Level, log
from dovetail.operator.operator_metrics import OperatorMetrics
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner
from dovetail.operator.reconcile import progress, reasons
from dovetail.operator.reconcile.children import (
    Children,
    Object,
    deleting,
    is_true,
    label,
    live,
    managed_elsewhere,
    parse_time,
    sizes,
)
from dovetail.operator.reconcile.conditions import JobEvent, state, why_deleted
from dovetail.operator.reconcile.disruption import Disruption, disruption, source
from dovetail.operator.reconcile.drift import Drift
from dovetail.operator.reconcile.history import JobHistory, history_config_map, last_row
from dovetail.operator.reconcile.reconcile import (
    AGAIN_SECONDS,
    PlanRefused,
    Reconciled,
    Seen,
    has_run,
    is_over,
    old_status,
    reconcile,
)
from dovetail.operator.reconcile.refusals import held_up, shared, started_anew
from dovetail.operator.reconcile.replan import Outlook, honoured, needs, resized, room
from dovetail.operator.reconcile.rootcause import waiting_pods
from dovetail.operator.render import sandboxes, spot
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import claim_names
from dovetail.operator.status_rate import StatusRate
from dovetail.operator.workqueue import WorkQueue
from dovetail.protocol.plan import Plan

RESYNC_SECONDS = 600.0
# Pods of a job change together. Objects that were written are looked at once more, because kubelets or Kueue change
# them.
GATHER_SECONDS = 1.0
BUSY = {JOBSET.kind, JOB.kind, POD.kind}
FIRST_SYNC_SECONDS = 1.0
PROCESS_SECONDS = 300.0
# A role lets the status API read the token, so the operator must have made the token before. A binding is refused
# before its role exists. Pods come last.
LATER = {ROLE.kind: 1, ROLE_BINDING.kind: 2, JOBSET.kind: 3, JOB.kind: 3, SANDBOX.kind: 3}
# Only the operator sets this label. Templates, webhooks and other tools write those of app.kubernetes.io.
OF_JOBS = names.UID_LABEL


class Controller:
    """The loop of the leading replica. `now` returns the time of day, which goes into objects."""

    def __init__(
        self,
        client: Client,
        planner: Planner,
        coordinators: CoordinatorPoller,
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.nodes = Nodes(client, settings.nodes_seconds, self.look_at_all)
        self._notices = Notices(client, spot.NOTICES | set(settings.notice_taints), self.look_at_all, now)
        limited = (
            "the operator serves only some namespaces, and so sees no classes, which belong to the cluster; remove the "
            "field, or ask the administrator for a release of the chart without namespaces"
        )
        self._classes = Classes(client, self.look_at_all, limited if settings.namespaces else "")
        self._client = client
        self._planner = planner
        self._coordinators = coordinators
        self._settings = settings
        self._metrics = metrics
        metrics.count_requests(lambda: client.requests)
        self._now = now
        self._dispatch = Dispatch(client, planner, settings, self._classes, now)
        self._tokens = Tokens(client, settings.namespace)
        self._mounts = Mounts(client, time.monotonic)
        self._drift = Drift()
        self._status_rate = StatusRate(time.monotonic)
        gangs = (POD_GROUPS[settings.gang],) if settings.gang in POD_GROUPS else ()
        self._kinds = (*CHILDREN, *gangs, *((SANDBOX,) if settings.sandboxes else ()))
        self._missing: set[str] = set()  # kinds that the API server does not have
        self._uids: dict[Key, str] = {}  # of the jobs that were looked at
        self._told: dict[Key, float] = {}  # when the first event came that was not acted on yet
        # By uid, the pods of a job that the cluster ended. Kubernetes deletes them within seconds.
        self._disrupted: dict[Key, dict[str, Disruption]] = {}
        self.store = ObjectCache()
        self.queue: WorkQueue[Key] = WorkQueue(time.monotonic)
        planner.done = self.queue.add

    async def observe(self, thing: Object, deleted: bool) -> None:
        """Handle a watch event. Store its object, and enqueue its job unless the reply to a write had the same news. An
        object without the form of its kind is ignored. Anybody may make one with our labels, and an object of one
        tenant must not stop the jobs of all."""
        try:
            if not deleted and self.store.knows(thing):
                return
            key = self.store.remove(thing) if deleted else self.store.put(thing)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            name = "/".join(str(thing.get("metadata", {}).get(key)) for key in ("namespace", "name"))
            said = f"{type(error).__name__}: {error}"
            log("object.unreadable", level="warning", object=f"{thing.get('kind')} {name}", error=said)
            return
        if key is not None:
            if (found := disruption(thing)) is not None and self._is_of_job(key, thing):
                self._disrupted.setdefault(key, {}).setdefault(str(thing["metadata"]["uid"]), found)
            self._told.setdefault(key, time.monotonic())
            soon = deleted or thing["kind"] not in BUSY or _ended(thing)
            await self.queue.add(key, 0.0 if soon else GATHER_SECONDS)

    def _is_of_job(self, key: Key, pod: Object) -> bool:
        """Whether the job controls the pod, which may be gone. Anybody may write its labels on a pod."""
        job = self.store.job(key)
        mine = self.store.children(key).of_job(str(job["metadata"]["uid"])) if job is not None else Children()
        return controller(pod).get("uid") in {each["metadata"]["uid"] for each in mine.of(JOB.kind)}

    async def run(self) -> None:
        """Work until cancelled. Decisions wait until everything is listed, because a job's children would seem to be
        missing before."""
        if self._settings.nodes_seconds > 0:
            await self.nodes.look()  # so that new jobs are planned with it
        await self._list_jobs()
        async with asyncio.TaskGroup() as group:
            listed = []
            if not self._settings.namespaces:  # such an operator has no right to see classes
                listed.append(first := asyncio.Event())
                told = partial(self._listed, RLHFJOB_CLASS, first)
                group.create_task(follow(self._client, RLHFJOB_CLASS, None, "", self._classes, told))
            for namespace in self._settings.namespaces or (None,):
                for resource in self._kinds:
                    listed.append(first := asyncio.Event())
                    told = partial(self._listed, resource, first)
                    group.create_task(follow(self._client, resource, namespace, OF_JOBS, self, told))
            for first in listed:
                await first.wait()
            await self.look_at_all()
            for _ in range(self._settings.workers):
                group.create_task(self._work())
            group.create_task(self._resync_forever())
            if self._settings.nodes_seconds > 0:
                group.create_task(self.nodes.run())
                if not self._settings.namespaces:  # such an operator has no right to see nodes
                    group.create_task(self._notices.run())

    async def _list_jobs(self) -> None:
        """List the RLHFJobs. This comes first, because children of unknown jobs are ignored."""
        while True:
            try:
                for namespace in self._settings.namespaces or (None,):
                    await self.relist(RLHFJOB, namespace)
                return
            except KubeError as error:
                log("sync.failed", level="warning", error=str(error))
                await asyncio.sleep(FIRST_SYNC_SECONDS)

    async def _listed(self, resource: Resource, first: asyncio.Event, there: bool) -> None:
        """Reconcile all jobs when the cluster gets or loses a kind, because their conditions name missing kinds."""
        if there != (resource.kind not in self._missing):
            self._missing ^= {resource.kind}
            log("kind.served" if there else "kind.missing", kind=resource.kind, api_version=resource.api_version)
            await self.look_at_all()
        first.set()

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            started = time.monotonic()
            told = self._told.pop(key, started)
            outcome = "ok"
            try:
                async with asyncio.timeout(PROCESS_SECONDS):
                    again = await self.process(key)
            except KubeError as error:
                outcome = "conflict" if error.status == 409 else "refused" if error.rejected else "error"
                pause = await self.queue.failed(key)
                log(
                    "reconcile.again",
                    level="warning",
                    job="/".join(key),
                    status=error.status,
                    error=str(error),
                    seconds=pause,
                )
            except Exception as error:
                outcome = "error"
                pause = await self.queue.failed(key)
                said = f"{type(error).__name__}: {error}"
                log("reconcile.failed", level="error", job="/".join(key), error=said, seconds=pause)
            else:
                await self.queue.done(key, again)
                self._metrics.applied(time.monotonic() - told)
            if outcome != "ok":
                self._told[key] = min(told, self._told.get(key, told))
            self._metrics.reconciled(outcome, time.monotonic() - started, len(self.queue))

    async def process(self, key: Key) -> float | None:
        """Reconcile one job. Returns the seconds until it must be looked at again. Raises KubeError."""
        document, children = self.store.job(key), self.store.children(key)
        await self._end_leftovers(key, children, "" if document is None else str(document["metadata"]["uid"]))
        if document is None or managed_elsewhere(document):
            self._coordinators.forget(key)
            self._mounts.forget(key)
            self._status_rate.forget(key)
            if self._metrics.jobs.forget(key):
                log("job.gone", job="/".join(key))
            if document is None or not self._dispatch.sends(document):
                self._dispatch.forget(key)
                self._forget(key)
                return None
            looked = await self._dispatch.look(key, document)
            for event in looked.events:
                await self._tell(document, event)
            return looked.again
        uid = str(document["metadata"]["uid"])
        if self._uids.setdefault(key, uid) != uid:  # another job with its name
            self._forget(key)
            self._uids[key] = uid
        children = children.of_job(uid)
        token = self._tokens.known(uid)
        planned: tuple[Any, Any] | PlanRefused = PlanRefused(reasons.NOT_PLANNED, "the job is over")
        reported, mounts, outlook, claims = None, dict[str, str](), Outlook(), set[str]()
        job_class: RLHFJobClass | PlanRefused | None = None
        if not is_over(old_status(document)):
            planned = await self._planner.planned(document, children)
            if isinstance(planned, PlanRefused) and planned.reason == reasons.PLANNING and _was_answered(document):
                return None  # what its status says stays until the planner answers
            outlook = self._outlook(key, uid, planned, children)
            if not isinstance(planned, PlanRefused):
                job_class = self._classes.of(planned[0])
                usable = None if isinstance(job_class, PlanRefused) else job_class
                context = RenderContext(planned[0], uid, planned[1], self._settings, job_class=usable)
                self._metrics.jobs.fits(key, _fits(context, outlook))
                claims = claim_names(context) if waiting_pods(children) else set()
            reported = self._coordinators.report(key, children, token)
            mounts = await self._mounts.problems(key, children, claims)
        result = reconcile(
            Seen(
                *(document, planned, children, reported, self._settings, mounts, self._drift, outlook),
                ending=self._notices.ending,
                leaving=self._notices.leaving,
                lost=self._notices.lost,
                disrupted=self._disruptions(key),
                job_class=job_class,
            ),
            self._now(),
        )
        if not any(c.type == "Disrupted" and c.status == "True" for c in result.status.conditions):
            self._disrupted.pop(key, None)
        for kind, name in result.release:
            self.store.put({"kind": kind, **await self._client.release(kind, children.objects[kind, name])})
            log("object.released", job="/".join(key), object=f"{kind}/{name}", reason="spec.storage.retain is Keep")
        if is_over(result.status):
            self._metrics.jobs.hold(key, "", {}, works=False)
            if not isinstance(planned, PlanRefused):  # it was not over before
                await self._keep_history(key, RenderContext(planned[0], uid, planned[1], self._settings), children)
            self._forget(key)
            self._coordinators.forget(key)
            later = await self._report(document, result.status, result.events)
            self._status_rate.forget(key)
            await self._delete(document, result)
            return _sooner(later, result.requeue)
        works = state(result.status.conditions) == "Running"
        jobset = children.get(JOBSET.kind, key[1])
        queue = label(document if jobset is None else jobset, names.QUEUE_LABEL)
        gpus = {} if isinstance(planned, PlanRefused) else _gpus(planned[0], children)
        self._metrics.jobs.hold(key, queue, gpus, works)
        try:
            await self._make(document, result, planned, children)
        except NameTaken as error:
            reason = reasons.CREATING if error.leaving else reasons.NAME_CONFLICT
            await self._delete(document, result)
            later = await self._hold_up(document, result, children, reason, str(error))
            return _sooner(later, result.requeue, AGAIN_SECONDS if error.leaving else self._settings.conflict_seconds)
        except KubeError as error:
            if error.status not in (0, 409):
                await self._delete(document, result)
                why = reasons.KIND_MISSING if isinstance(error, KindMissing) else reasons.APPLY_FAILED
                await self._hold_up(document, result, children, why, str(error))
            raise
        await self._delete(document, result)
        later = await self._report(document, result.status, result.events)
        if any(c.reason == reasons.CONFIG_MISSING for c in result.status.conditions):
            self._tokens.doubt(uid)
        if token is None and self._tokens.known(uid) is not None and not result.apply:
            return 0.0  # the coordinator can be asked from now on
        return _sooner(later, result.requeue, GATHER_SECONDS if result.apply else None)

    async def _end_leftovers(self, key: Key, things: Children, uid: str) -> None:
        """Delete what makes pods for an earlier RLHFJob of this name. `uid` is the present one's, empty if there is
        none. Kubernetes' garbage collector does so as well, but it misses a deletion while the definition of RLHFJobs
        goes back to an older version, and the pods would keep their GPUs for ever. Both are read once more, because
        `kubectl delete --cascade=orphan` first takes the owner away, and then the job."""
        for (kind, name), thing in things.objects.items():
            if kind not in (JOBSET.kind, JOB.kind, SANDBOX.kind) or deleting(thing) or not left_by(thing, key[1], uid):
                continue
            job = await self._client.find(KIND, *key)
            found = await self._client.find(kind, key[0], name)
            if found is not None and left_by(found, key[1], "" if job is None else str(job["metadata"]["uid"])):
                await self._client.delete(kind, key[0], name, str(found["metadata"]["uid"]))
                log("object.deleted", job="/".join(key), object=f"{kind}/{name}", reason="its RLHFJob is gone")

    def _forget(self, key: Key) -> None:
        """Keep nothing of a job that is gone or over. Its manifest and plan may take megabytes."""
        self._planner.forget(key)
        self._disrupted.pop(key, None)
        if (uid := self._uids.pop(key, None)) is not None:
            self._drift.forget(uid)
            self._tokens.forget(uid)

    def _disruptions(self, key: Key) -> list[Disruption]:
        """The pods that the job lost. Who takes a node is kept, because the node may be gone before the pods are
        back."""
        found = self._disrupted.get(key, {})
        for uid, each in found.items():
            told = source(self._notices.leaving.get(each.node, ()), each.tolerations)
            found[uid] = replace(each, source=each.source or told)
        return list(found.values())

    def _outlook(self, key: Key, uid: str, planned: tuple[RLHFJob, Plan] | PlanRefused, children: Children) -> Outlook:
        """The number of rollouts for which the nodes have room, and the plan for that number once it is made."""
        pools, refused = self.nodes.pools, self.nodes.refused
        if isinstance(planned, PlanRefused) or not (pools is not None or refused):
            return Outlook()
        (job, plan), jobset = planned, children.get(JOBSET.kind, key[1])
        wanted = needs(RenderContext(job, uid, plan, self._settings, sizes(jobset)))
        if not wanted or pools is None:
            return Outlook(refused=refused and bool(wanted))
        there = room(wanted, pools)
        spec = resized(job.spec, plan, wanted, there)
        if spec is None:
            return Outlook(there, refused=refused)
        found = self._planner.variant(key, spec, self.queue.add)
        if isinstance(found, PlanRefused):
            return Outlook(there, problem=found.message, refused=refused)
        return Outlook(there, None if found is None else honoured(plan, found), found is None, refused=refused)

    # ------------------------------------------------------------ effects

    async def _make(
        self, document: Object, result: Reconciled, planned: tuple[RLHFJob, Plan] | PlanRefused, children: Children
    ) -> None:
        """Create and change what `result` asks for. The Service is made before the token, because pods send the token
        to whoever owns a Service with that name. Objects that allow somebody to read the token's Secret are made after
        it. Raises NameTaken and KubeError."""
        if isinstance(planned, PlanRefused):
            return
        context = RenderContext(planned[0], str(document["metadata"]["uid"]), planned[1], self._settings)
        begins = any(thing["kind"] == JOBSET.kind for thing in result.apply)
        if begins and (problem := self._names_shared(document)):
            raise NameTaken(problem, leaving=False)
        if begins and sandboxes.pods(context.job.spec) and SANDBOX.kind in self._missing:
            # Not when its pods have taken GPUs.
            raise KindMissing(NO_SANDBOX)
        grants = any(thing["kind"] in (ROLE.kind, ROLE_BINDING.kind) for thing in result.apply)
        for turn in (0, 1, 2, 3):
            if turn == 1 and (result.token or grants):
                started = children.get(JOBSET.kind, context.name) is not None or has_run(old_status(document))
                await self._tokens.ensure(context, started=started)
            things = [thing for thing in result.apply if LATER.get(thing["kind"], 0) == turn]
            for event in await self._apply(things, context, children):
                log("job.event", job=f"{context.namespace}/{context.name}", reason=event.reason, message=event.message)
                await self._record(document, event)

    def _names_shared(self, document: Object) -> str | None:
        namespace = document["metadata"]["namespace"]

        def find(name: str) -> Object | None:
            job = self.store.job((namespace, name))
            if job is None or managed_elsewhere(job) or (is_over(old_status(job)) and not started(name)):
                return None
            return job

        def started(name: str) -> bool:
            return self.store.children((namespace, name)).get(JOBSET.kind, name) is not None

        return shared(document, find, started)

    async def _apply(self, things: list[Object], context: RenderContext, children: Children) -> list[JobEvent]:
        """Write all objects at the same time. Returns the events to record. Raises NameTaken or the first KubeError,
        after all requests were answered."""

        async def put(thing: Object) -> Object:
            there = children.get(thing["kind"], thing["metadata"]["name"])
            if there is None:
                return await own_objects.create(self._client, dict(thing), context)
            return await self._client.apply(thing, str(there["metadata"]["uid"]))

        replies = await asyncio.gather(*(put(thing) for thing in things), return_exceptions=True)
        for thing, reply in zip(things, replies, strict=True):
            if not isinstance(reply, BaseException):
                self.store.put(reply)
                name = f"{thing['kind']}/{thing['metadata']['name']}"
                there = children.get(thing["kind"], thing["metadata"]["name"])
                job = f"{context.namespace}/{context.name}"
                if there is None:
                    log("object.created", job=job, object=name, reason="the job needs it")
                elif there["metadata"].get("resourceVersion") != reply["metadata"]["resourceVersion"]:
                    log("object.changed", job=job, object=name, reason="it is not as the manifest says")
                    if self._drift.corrected(thing, reply, self._now()):
                        told = "others change it again and again, so it is corrected more and more seldom"
                        log("object.contested", level="warning", job=job, object=name, reason=told)
                else:
                    self._drift.settle(thing, reply)
                    log("object.differs", level="warning", job=job, object=name, reason="others have added to it")
        made = [reply for reply in replies if not isinstance(reply, BaseException)]
        claims = [thing for thing in made if thing["kind"] == VOLUME_CLAIM.kind]
        asked = context.job.spec.storage.folder is not None  # then its user knows
        news = [event for claim in claims if not asked and (event := started_anew(claim)) is not None]
        if taken := [reply for reply in replies if isinstance(reply, NameTaken)]:
            raise NameTaken.all_of(taken)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return news

    async def _keep_history(self, key: Key, context: RenderContext, children: Children) -> None:
        """Keep the history of a job that ends, before its status says so. A failure is only logged."""
        found = self._coordinators.history(key) or JobHistory("")
        status, at = progress.last_status(children)
        found.take([last_row(status, (parse_time(at) or self._now()).timestamp())], missing=True)
        if text := found.text():
            try:
                await self._apply([history_config_map(context, text)], context, children)
            except (KubeError, NameTaken) as error:
                log("history.lost", level="warning", job="/".join(key), error=str(error))

    async def _delete(self, document: Object, result: Reconciled) -> None:
        namespace = document["metadata"]["namespace"]
        key, uid = (namespace, document["metadata"]["name"]), str(document["metadata"]["uid"])
        children = self.store.children(key).of_job(uid) if result.delete else Children()
        for kind, name in result.delete:
            there = children.get(kind, name)
            if there is not None:
                await self._client.delete(kind, namespace, name, str(there["metadata"].get("uid", "")))
                log("object.deleted", job="/".join(key), object=f"{kind}/{name}", reason=why_deleted(result.status))
        if result.expired:
            log("job.expired", job="/".join(key), reason="spec.ttlSecondsAfterFinished have passed")
            await self._client.delete(KIND, namespace, document["metadata"]["name"], str(document["metadata"]["uid"]))

    async def _hold_up(
        self, document: Object, result: Reconciled, children: Children, reason: str, problem: str
    ) -> float | None:
        """Report what keeps the job's objects from being made."""
        status, events = held_up(
            old_status(document),
            result.status,
            result.events,
            reason,
            problem,
            started=children.get(JOBSET.kind, document["metadata"]["name"]) is not None,
            generation=int(document["metadata"].get("generation", 0)),
            now=self._now(),
        )
        return await self._report(document, status, events)

    async def _report(self, document: Object, status: RLHFJobStatus, events: list[JobEvent]) -> float | None:
        """Write the status if it has changed, then the events of the change. Returns the seconds until the job must be
        reconciled again, because it asks for that or because it is too early to write. None if it need not be."""
        status = status.model_copy(update={"state": state(status.conditions)})
        wanted = json.loads(status.model_dump_json(by_alias=True, exclude_none=True))
        key = document["metadata"]["namespace"], document["metadata"]["name"]
        self._metrics.jobs.look(key, status)
        if wanted == document.get("status"):
            return None
        if (wait := self._status_rate.wait(key, document.get("status") or {}, wanted)) > 0:
            return wait
        self._status_rate.wrote(key)
        try:
            self.store.put({"kind": KIND, **await self._client.write_status(document, wanted)})
        except KubeError as error:
            if error.status == 404:
                self.store.remove(document)  # it was deleted meanwhile, even if no watch has reported that
                return None
            if error.status in (409, 422):
                metadata = document["metadata"]
                fresh = await self._client.get(RLHFJOB, metadata["namespace"], metadata["name"])
                self.store.put(fresh)
                if fresh["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
                    raise KubeError(409, "the job changed meanwhile") from error
            raise
        if status.state != (document.get("status") or {}).get("state"):
            log("job.state", job="/".join(key), state=status.state, stage=status.stage, iteration=status.iteration)
        for event in events:
            await self._tell(document, event)
        return GATHER_SECONDS

    async def _tell(self, document: Object, event: JobEvent) -> None:
        level: Level = "warning" if event.type == "Warning" else "info"
        job = f"{document['metadata']['namespace']}/{document['metadata']['name']}"
        log("job.event", level=level, job=job, reason=event.reason, message=event.message)
        await self._record(document, event)

    async def _record(self, document: Object, event: JobEvent) -> None:
        """Write a core/v1 Event. A failure is ignored."""
        metadata, at = document["metadata"], self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        reference = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        thing = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": {"apiVersion": document["apiVersion"], "kind": KIND, **reference},
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:1000],
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": self._settings.identity,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            await self._client.create(thing)
        except KubeError as error:
            log("event.lost", level="warning", job=f"{metadata['namespace']}/{metadata['name']}", error=str(error))

    # ------------------------------------------------------------ resync

    async def _resync_forever(self) -> None:
        """Compare the cache with lists from time to time. kopf may miss the deletion of an RLHFJob while it reconnects,
        and an API server may be restored from an older copy."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            try:
                await self.resync()
            except KubeError as error:
                log("resync.failed", level="warning", error=str(error))

    async def resync(self) -> None:
        """Bring the store in line with the API server, and look at every job. Raises KubeError."""
        for namespace in self._settings.namespaces or (None,):
            for resource in (RLHFJOB, *self._kinds):
                await self.relist(resource, namespace)
        self._tokens.doubt()
        await self.look_at_all()

    async def look_at_all(self) -> None:
        """Look at every job again."""
        for key in self.store.jobs():
            await self.queue.add(key)

    async def relist(self, resource: Resource, namespace: str | None) -> str | None:
        """Store all objects of a list, and treat the objects that it lacks as deleted. Returns the list's version. None
        if the API server does not know the kind. Raises KubeError."""
        gone = self.store.uids(resource.kind, namespace)
        version: str | None = ""
        try:
            async for page in self._client.pages(resource, namespace, "" if resource is RLHFJOB else OF_JOBS):
                version = page.version
                for item in page.items:
                    await self.observe(item, deleted=False)
                    key, name = key_of(item), item["metadata"]["name"]
                    if key is not None and gone.get((key, name)) == item["metadata"]["uid"]:
                        del gone[key, name]
        except KubeError as error:
            if error.status != 404:
                raise
            version = None
        for (key, name), uid in gone.items():
            await self.observe(_shell(resource.kind, key, name, uid), deleted=True)
        return version


def _fits(context: RenderContext, outlook: Outlook) -> bool | None:
    """Whether the nodes have room for the pods with which the job starts. None if the operator does not see the
    nodes."""
    if (there := outlook.room) is None:
        return None if needs(context) else True
    return all(there[g.name] >= context.guaranteed(g) for g in context.job.spec.groups if g.name in there)


def _gpus(job: RLHFJob, children: Children) -> dict[str, int]:
    """The GPUs of the job's pods that are on nodes, by product."""
    groups = {group.name: group.gpu for group in job.spec.groups}
    found = Counter[str]()
    for pod in live(children.of(POD.kind)):
        gpu = groups.get(label(pod, names.GROUP_LABEL))
        if gpu is not None and gpu.product is not None and pod.get("spec", {}).get("nodeName"):
            found[gpu.product] += gpu.per_pod
    return dict(found)


def _was_answered(document: Object) -> bool:
    """Whether the job has a plan, or the planner has already failed at the same manifest. Otherwise each new attempt
    would change the condition twice and record an Event."""
    planned = next((c for c in old_status(document).conditions if c.type == "Planned"), None)
    if planned is None or planned.status == "True":
        return planned is not None
    again = planned.observed_generation == int(document["metadata"].get("generation", 0))
    return again and planned.reason in (reasons.PLANNER_TIMEOUT, reasons.PLANNER_FAILED)


def _ended(thing: Object) -> bool:
    """Whether this is a JobSet that is over. MultiKueue copies the job's last status about a second later."""
    return bool(thing["kind"] == JOBSET.kind and (is_true(thing, "Completed") or is_true(thing, "Failed")))


def _shell(kind: str, key: Key, name: str, uid: str) -> Object:
    """The fields that identify an object."""
    labels = {names.JOB_LABEL: key[1]}
    return {"kind": kind, "metadata": {"name": name, "namespace": key[0], "uid": uid, "labels": labels}}


def _sooner(*seconds: float | None) -> float | None:
    return min((value for value in seconds if value is not None), default=None)
