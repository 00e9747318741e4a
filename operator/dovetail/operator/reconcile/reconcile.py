"""`reconcile` decides what to do for one job, from everything that is known of it.

It is level-triggered, so its answer does not depend on what happened before. It may be called at any time. If a step
failed, the next call asks for it again. Facts that must not be forgotten are in the job's status. The most important
one is that the job is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from dovetail.kube import names
from dovetail.kube.owners import controlled_by
from dovetail.kube.resources import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    JOB,
    JOBSET,
    NETWORK_POLICY,
    POD,
    SANDBOX,
    SERVICE,
    VOLUME_CLAIM,
)
from dovetail.manifest.job_class import RLHFJobClass
from dovetail.manifest.sizes import pod_count
from dovetail.manifest.status import GroupStatus, RLHFJobStatus
from dovetail.manifest.types import RLHFJob, Role
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.reconcile import progress, reasons, rootcause
from dovetail.operator.reconcile.children import (
    Children,
    Object,
    Ref,
    changed_at,
    condition,
    deleting,
    images,
    is_gone,
    is_ready,
    is_refused,
    is_true,
    jobs_of,
    label,
    live,
    matches,
    parse_time,
    sizes,
)
from dovetail.operator.reconcile.conditions import Conditions, JobEvent
from dovetail.operator.reconcile.disruption import Disruption, Taking, lasting, slot, source
from dovetail.operator.reconcile.drift import Drift, look_at
from dovetail.operator.reconcile.plans import publish
from dovetail.operator.reconcile.replan import Outlook
from dovetail.operator.render import sandboxes
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import class_labels, jobset, pods_changed, surplus_jobs
from dovetail.operator.render.objects import WITH_PODS, lifted, supporting_objects, while_pods_live
from dovetail.protocol.plan import Plan

AGAIN_SECONDS = 2.0  # the time until the next look at changes without an event
LATEST_SECONDS = 86400.0  # manifests may name any number of seconds, but timers have a limit
PLANNER_AGAIN_SECONDS = 20.0  # the time until a planner that was too slow or broke is asked again
# failurePolicy.maxRestarts counts the restarts in this time. The launcher on one machine does the same.
RESTART_WINDOW = timedelta(hours=1)
# The JobSet of a job that MultiKueue sent here stays this many seconds after the operator has ended the job. While it
# is there, Kueue copies the job's status to the cluster that sent it. The operator there ends the rest.
SENT_SECONDS = 60.0
# The reasons why pods have no nodes, or do not exist.
HOLDS_PODS = {reasons.UNSCHEDULABLE, reasons.CLAIM_MISSING, reasons.PODS_REFUSED, reasons.NAME_CONFLICT}
MOST_TOLD = 4  # pods that the condition Disrupted names
# A rollout that worked this long was not broken from the start.
STEADY = timedelta(minutes=1)


@dataclass(frozen=True)
class PlanRefused:
    """There is no plan. It has the reason of the condition Planned, and a sentence."""

    reason: str
    message: str


@dataclass(frozen=True)
class Seen:
    """The known facts about one job. `document` is the RLHFJob as the API server has it. `planned` is the result of
    reading and planning it. `children` has the objects that the job controls. `reported` is the coordinator's own
    status, if it answered. `mounts` has messages about volumes that pods wait for, by uid. `drift` is a memory that
    saves work, and slows quarrels with others down. `outlook` is the room on the nodes. `ending` has the nodes that
    will end soon, with the time at which that was noticed. `leaving` has the nodes that lose their pods, and what takes
    them. `lost` has the nodes that are not ready. `disrupted` has the pods that the cluster ended.
    `job_class` is the class that the job names, or the reason why it cannot be used."""

    document: Object
    planned: tuple[RLHFJob, Plan] | PlanRefused
    children: Children
    reported: Mapping[str, Any] | None = None
    settings: OperatorSettings = field(default_factory=OperatorSettings)
    mounts: Mapping[str, str] = field(default_factory=dict)
    drift: Drift = field(default_factory=Drift)
    outlook: Outlook = field(default_factory=Outlook)
    ending: Mapping[str, datetime] = field(default_factory=dict)
    leaving: Mapping[str, Sequence[Taking]] = field(default_factory=dict)
    lost: Mapping[str, rootcause.LostNode] = field(default_factory=dict)
    disrupted: Sequence[Disruption] = ()
    job_class: RLHFJobClass | PlanRefused | None = None


@dataclass(frozen=True)
class Reconciled:
    """The objects to create or change, then those to delete, and then the status to report. A job that is over is
    reported first, so that nobody starts it again. The job must be reconciled again within `requeue` seconds. `expired`
    says to delete the RLHFJob itself. `token` says that the token's Secret must exist before the pods. `release` has
    objects that lose their owner first, so that they outlive the job."""

    status: RLHFJobStatus
    apply: list[Object] = field(default_factory=list)
    delete: list[Ref] = field(default_factory=list)
    requeue: float | None = None
    events: list[JobEvent] = field(default_factory=list)
    expired: bool = False
    token: bool = False
    release: list[Ref] = field(default_factory=list)


def old_status(document: Object) -> RLHFJobStatus:
    return RLHFJobStatus.model_validate(document.get("status") or {})


def is_over(status: RLHFJobStatus) -> bool:
    """Whether the job has completed or failed. Nothing is created for it then, unless its user tries it again."""
    return any(c.type in ("Completed", "Failed") and c.status == "True" for c in status.conditions)


def has_run(status: RLHFJobStatus) -> bool:
    """Whether the job's pods have run before, because its coordinator has answered, or it has failed since. Users
    cannot write the status."""
    return status.stage is not None or any(c.type == "Failed" for c in status.conditions)


def tries_again(document: Object, status: RLHFJobStatus) -> bool:
    """Whether the job has failed, and its user has raised spec.retry since."""
    wanted = int((document.get("spec") or {}).get("retry") or 0)
    return any(c.type == "Failed" and c.status == "True" for c in status.conditions) and wanted > (status.retry or 0)


def reconcile(seen: Seen, now: datetime) -> Reconciled:
    """Decide what to do for one job, as the module's docstring says. `now` has a time zone."""
    if deleting(seen.document):
        return Reconciled(old_status(seen.document))  # the garbage collector does the rest
    return replace(_reconcile(seen, now), release=_released(seen))


def _released(seen: Seen) -> list[Ref]:
    """The claim that must outlive the job but is still owned by it, or has a label by which it could be pruned. An
    earlier release made it, or the manifest said so before."""
    name = names.volume_claim(str(seen.document["metadata"]["name"]))
    claim = seen.children.get(VOLUME_CLAIM.kind, name)
    storage = (seen.document.get("spec") or {}).get("storage") or {}
    if claim is None or deleting(claim) or storage.get("retain", "Keep") != "Keep":
        return []
    uid = str(seen.document["metadata"]["uid"])
    found = controlled_by(claim, uid) or names.INSTANCE_LABEL in (claim["metadata"].get("labels") or {})
    return [(VOLUME_CLAIM.kind, name)] if found else []


def _reconcile(seen: Seen, now: datetime) -> Reconciled:
    old = old_status(seen.document)
    generation = int(seen.document["metadata"].get("generation", 0))
    conditions = Conditions(old.conditions, generation, now)
    status = old.model_copy(update={"observed_generation": generation})
    if tries_again(seen.document, old):
        return _again(seen, conditions, status)
    if is_over(old):
        return _after_the_end(seen, old, now)
    planned, mine = seen.planned, _jobset(seen)
    if mine is None and not isinstance(planned, PlanRefused):
        planned = refused(planned[0], seen.job_class, seen.settings) or planned
    if (retry := int((seen.document.get("spec") or {}).get("retry") or 0)) or old.retry:
        status = status.model_copy(update={"retry": retry})
    if isinstance(planned, PlanRefused):
        return _refused(seen, planned, conditions, status, now)
    uid, room = str(seen.document["metadata"]["uid"]), seen.outlook.room or {}
    usable = None if isinstance(seen.job_class, PlanRefused) else seen.job_class
    context = RenderContext(planned[0], uid, planned[1], seen.settings, sizes(mine), room, images(mine), usable)
    made = seen.children.get(CONFIG_MAP.kind, names.plan_config_map(context.name)) if mine is not None else None
    plan = publish(context, conditions, old, seen.reported, seen.outlook, made, _class_news(seen, context, mine))
    status = status.model_copy(update={"plan": plan})
    return _Reconciler(seen, context, conditions, status, now).run()


def refused(
    job: RLHFJob, job_class: RLHFJobClass | PlanRefused | None, settings: OperatorSettings
) -> PlanRefused | None:
    """Why a job that has a plan gets no pods: its class, its sandboxes, or an image without kernels for its GPUs."""
    if isinstance(job_class, PlanRefused):
        return job_class
    if sandboxes.pods(job.spec) and not settings.sandboxes:
        return PlanRefused(
            reasons.INVALID_SPEC,
            "spec.sessions.sandbox is Pod, which this operator may not make; ask the administrator for the chart's "
            "jobs.sandboxes.enabled, or write Bubblewrap or None",
        )
    errors = settings.image_errors(job.spec if job_class is None else job_class.given_to(job.spec))
    return PlanRefused(reasons.INVALID_SPEC, " ".join(errors)) if errors else None


def _class_news(seen: Seen, context: RenderContext, jobset: Object | None) -> str:
    """What has become of the class of a job whose pods were made by it. Empty if nothing has. Pods that run keep what
    the class said, and the next ones get what it says then."""
    if jobset is None:
        return ""
    if isinstance(seen.job_class, PlanRefused) and _waits(jobset):
        return f"its pods will be as the class said before: {seen.job_class.message.rstrip('.')}"
    if isinstance(seen.job_class, PlanRefused):
        return f"pods that run stay, but no more are made: {seen.job_class.message.rstrip('.')}"
    labels = jobset["metadata"].get("labels") or {}
    if not _waits(jobset) and any(labels.get(key) != value for key, value in class_labels(context).items()):
        name = context.job.spec.job_class
        return (
            f"class {name} has changed since the pods were made; set spec.suspend to true, and then to false, to use it"
        )
    return ""


def _waits(jobset: Object) -> bool:
    return bool(jobset["spec"].get("suspend"))


class _Reconciler:
    """Reconciles a job that has a plan and is not over."""

    def __init__(
        self, seen: Seen, context: RenderContext, conditions: Conditions, status: RLHFJobStatus, now: datetime
    ) -> None:
        self._seen = seen
        self._context = context
        self._old = status
        self._conditions = conditions
        self._status = status
        self._now = now
        self._children = seen.children
        self._jobset = _jobset(seen)
        self._pods = seen.children.pods(surplus=False)
        self._requeue: list[float] = []

    def run(self) -> Reconciled:
        if self._jobset is not None and is_true(self._jobset, "Completed"):
            return self._completed()
        self._progress()
        if self._jobset is not None and (problem := self._failure(self._jobset)) is not None:
            return self._failed(problem)
        if self._context.job.spec.suspend:
            return self._suspended()
        apply = self._supporting_objects()
        if self._jobset is None:
            self._say_stopped(reasons.CREATING, "")
            self._conditions.set("Suspended", False, reasons.NOT_SUSPENDED)
            apply.append(jobset(self._context))
            return self._result(apply=apply, delete=_beside(self._children), token=True)
        if (self._changed(self._jobset) or self._moved(self._jobset)) and not deleting(self._jobset):
            # It was changed while it was suspended for so short a time that its old pods still exist, or while it waits
            # in a queue.
            self._say_stopped(reasons.CREATING, "the pods are made anew from the changed manifest")
            self._requeue.append(AGAIN_SECONDS)
            return self._result(apply=apply, delete=[*_beside(self._children), (JOBSET.kind, self._context.name)])
        if _waits(self._jobset) or deleting(self._jobset):
            return self._queued(apply)
        self._conditions.set("Suspended", False, reasons.NOT_SUSPENDED)
        self._say_running()
        if (hopeless := self._waits_in_vain(self._jobset)) is not None:
            return self._requeued(apply, hopeless)
        more, less = self._surplus()
        boxes, over = self._sandboxes()
        delete = [*less, *over, *self._leaving(), *self._anew()]
        return self._result(apply=[*apply, *more, *boxes], delete=delete, token=True)

    # ------------------------------------------------------------ states

    def _completed(self) -> Reconciled:
        document = progress.last_status(self._children)[0]
        final = progress.fields(document)
        self._say_health(document or self._seen.reported or {})
        self._take(final or progress.fields(self._seen.reported or {}))
        status = self._status
        if status.iterations is not None and final:
            self._status = status.model_copy(update={"iteration": status.iterations})
        made = progress.artifacts(self._context, document)
        self._status = self._status.model_copy(update={"artifacts": made})
        stages = ", ".join(self._context.job.spec.stages)
        self._end("Completed", reasons.COMPLETED, f"all stages are done: {stages}")
        self._conditions.set("Degraded", False, reasons.AS_EXPECTED)
        return self._result(delete=_beside(self._children))

    def _failed(self, problem: PlanRefused) -> Reconciled:
        self._say_health(progress.last_health(self._children))
        self._conditions.set("Completed", False, reasons.FINISHED)
        self._end("Failed", problem.reason, problem.message)
        if _was_sent(self._seen.document):
            self._requeue.append(SENT_SECONDS)
            return self._result(delete=_beside(self._children))
        return self._result(delete=[*_beside(self._children), *_unfinished(self._jobset)])

    def _end(self, kind: Any, reason: str, message: str) -> None:
        self._conditions.set(kind, True, reason, message)
        self._conditions.set("Running", False, reasons.FINISHED)
        self._undisturbed()
        none = [group.model_copy(update={"ready": 0}) for group in self._groups()]
        ended = {"completion_time": self._now.replace(microsecond=0), "groups": none}
        self._status = self._status.model_copy(update=ended)

    def _suspended(self) -> Reconciled:
        """Delete the pods and keep everything else. The job resumes from its volume."""
        self._conditions.set("Suspended", True, reasons.SUSPENDED, "spec.suspend is true")
        self._say_stopped(reasons.STOPPED, "spec.suspend is true")
        gone = [] if self._jobset is None or deleting(self._jobset) else [(JOBSET.kind, self._context.name)]
        return self._result(apply=self._supporting_objects(), delete=[*_beside(self._children), *gone])

    def _queued(self, apply: list[Object]) -> Reconciled:
        assert self._jobset is not None
        if deleting(self._jobset):
            self._conditions.set("Suspended", False, reasons.NOT_SUSPENDED)
            held = rootcause.worst(self._pods, lost=self._seen.lost)
            lost = held is not None and held.reason == reasons.NODE_LOST
            why = f": {held.sentence}" if held is not None and lost else ""
            self._say_stopped(reasons.CREATING, f"an earlier JobSet is being deleted{why}")
            self._requeue.append(AGAIN_SECONDS)
        else:
            queue = label(self._jobset, names.QUEUE_LABEL)
            why = f"waits for quota in queue {queue}" if queue else "the JobSet is suspended"
            if said := self._seen.mounts.get(str(self._jobset["metadata"].get("uid"))):
                why += f": {said}"
            self._conditions.set("Suspended", True, reasons.QUEUED, why)
            if queue:
                self._requeue.append(self._look_again_in_queue())
            self._say_stopped(reasons.STOPPED, why)
        return self._result(apply=apply, delete=_beside(self._children), token=True)

    def _waits_in_vain(self, jobset: Object) -> Object | None:
        """The trainer or coordinator that was disrupted and finds no node, if the rest of the job holds GPUs that
        others wait for. Without a queue or a gang scheduler the job would take them again at once."""
        # Kueue itself puts JobSets without a queue into the queue `default`, if there is one.
        together = label(jobset, names.QUEUE_LABEL) or self._context.settings.gang
        if isinstance(self._seen.job_class, PlanRefused):
            return None  # the JobSet could not be made anew
        if not together or not self._conditions.is_true("Disrupted") or _was_sent(self._seen.document):
            return None
        return next((pod for pod in self._stranded() if label(pod, names.GROUP_LABEL) not in self._rollouts()), None)

    def _requeued(self, apply: list[Object], pod: Object) -> Reconciled:
        """End the pods that are left, so that the job waits as a whole, as it did before its start."""
        held = rootcause.cause(pod, self._seen.mounts)
        why = f"training cannot go on: {held.sentence if held else pod['metadata']['name']}; the job waits again"
        self._conditions.set("Disrupted", False, reasons.REQUEUED, why)
        self._say_stopped(reasons.CREATING, why)
        return self._result(apply=apply, delete=[*_beside(self._children), (JOBSET.kind, self._context.name)])

    def _look_again_in_queue(self) -> float:
        """The seconds until the operator asks again why the job waits for its quota. It may wait for days."""
        was = next((c for c in self._old.conditions if c.type == "Suspended" and c.status == "True"), None)
        new = was is None or self._now - was.last_transition_time < timedelta(seconds=2 * rootcause.LOOK_SECONDS)
        return rootcause.LOOK_SECONDS if new else rootcause.LOOK_SELDOM_SECONDS

    def _say_stopped(self, reason: str, message: str) -> None:
        for kind in ("Scheduled", "Running"):
            self._conditions.set(kind, False, reason, message)  # type: ignore[arg-type]
        self._conditions.set("Degraded", False, reasons.AS_EXPECTED)
        self._undisturbed()
        self._conditions.set("Completed", False, reasons.IN_PROGRESS)
        # The deadline counts the time since the job last started, as a batch/v1 Job's does.
        self._status = self._status.model_copy(update={"start_time": None, "groups": self._groups()})

    def _say_running(self) -> None:
        expected = sum(self._context.sizes.values())
        pods = live(self._pods)
        # If the coordinator is done, nothing is missing, even before its JobSet is done.
        done = sum(p.get("status", {}).get("phase") == "Succeeded" for p in self._pods)
        scheduled = done + sum(is_true(p, "PodScheduled") for p in pods)
        ready = done + sum(is_ready(p) for p in pods)
        cause = None
        if ready < expected:
            cause = rootcause.worst(self._unmended(), self._seen.mounts, self._seen.lost) or self._refused()
        told = cause.sentence if cause else ""
        if cause and cause.reason == reasons.UNSCHEDULABLE:
            told = "; ".join(filter(None, (told, rootcause.claims_told(self._children, self._seen.mounts))))
        if cause and cause.reason == reasons.IMAGE_PULL and (others := self._other_images()):
            told += f"; pods that are made now get {others}: set spec.suspend to true, and then to false"
        if scheduled >= expected:
            self._conditions.set("Scheduled", True, reasons.ALL_SCHEDULED, f"{expected} pods have nodes")
        elif cause and cause.reason in HOLDS_PODS:
            self._conditions.set("Scheduled", False, cause.reason, told)
        else:
            self._conditions.set("Scheduled", False, reasons.CREATING, f"{scheduled} of {expected} pods have nodes")
        doing = "; ".join(filter(None, (progress.download(self._seen.reported or {}), self._sandboxes_told())))
        if ready >= expected:
            message = "; ".join(filter(None, (f"{expected} pods are ready", doing)))
            self._conditions.set("Running", True, reasons.ALL_READY, message)
        else:
            message = "; ".join(filter(None, (f"{ready} of {expected} pods are ready", told, doing)))
            self._conditions.set("Running", False, cause.reason if cause else reasons.STARTING, message)
        self._say_disrupted(ready >= expected)
        if any(rootcause.creating(p) for p in pods) or rootcause.lacking(self._children):
            self._requeue.append(rootcause.LOOK_SECONDS)
        elif rootcause.stuck(self._children):
            self._requeue.append(self._look_again(pods))
        started = self._status.start_time
        if started is None and any(p.get("status", {}).get("phase") == "Running" for p in pods):
            self._status = self._status.model_copy(update={"start_time": self._now.replace(microsecond=0)})
        if cause and (started is not None or not cause.waiting):
            self._conditions.set("Degraded", True, cause.reason, told)
        else:
            self._conditions.set("Degraded", False, reasons.AS_EXPECTED)
        self._conditions.set("Completed", False, reasons.IN_PROGRESS)
        self._status = self._status.model_copy(update={"groups": self._groups()})

    def _unmended(self) -> list[Object]:
        """The pods without those that ended and have a successor that works."""
        works = {slot(pod) for pod in self._pods if is_ready(pod)}
        return [pod for pod in self._pods if not is_gone(pod) or slot(pod) not in works]

    def _say_disrupted(self, whole: bool) -> None:
        """Set the condition Disrupted from the pods that the cluster ended and that have no successor yet. It stays
        until all pods are ready again."""
        if whole:
            self._undisturbed()
            return
        back = {slot(pod) for pod in self._pods if is_ready(pod)}
        lost = sorted((each for each in self._seen.disrupted if each.slot not in back), key=lambda each: each.at)
        if not lost:
            return
        told = [each.sentence() for each in lost[:MOST_TOLD]]
        told += [f"{len(lost) - MOST_TOLD} more pods left"] if len(lost) > MOST_TOLD else []
        stops = any(each.group not in self._rollouts() for each in lost)
        told.append("training stops until they are back" if stops else "the job goes on without them")
        self._conditions.set("Disrupted", True, lost[-1].reason, "; ".join(told))

    def _undisturbed(self) -> None:
        """A job that was never disrupted has no such condition."""
        if self._conditions.is_true("Disrupted"):
            self._conditions.set("Disrupted", False, reasons.AS_EXPECTED)

    def _other_images(self) -> str:
        """The images that the JobSet would have if it were made now, if they differ. The chart's values may have been
        corrected since."""
        now = images(jobset(replace(self._context, images={})))
        return ", ".join(sorted({image for group, image in now.items() if self._context.images.get(group) != image}))

    def _look_again(self, pods: list[Object]) -> float:
        """The seconds until the operator asks again why pods get no nodes, or why there are no pods. They may wait for
        days."""
        made = [str(thing["metadata"].get("creationTimestamp") or "") for thing in (self._jobset or {}, *pods) if thing]
        since = parse_time(max(made)) or self._now
        new = self._now - since < timedelta(seconds=2 * rootcause.LOOK_SECONDS)
        return rootcause.LOOK_SECONDS if new else rootcause.LOOK_SELDOM_SECONDS

    # ------------------------------------------------------------ failures

    def _failure(self, jobset: Object) -> PlanRefused | None:
        cause = rootcause.worst(p for p in self._pods if p.get("status", {}).get("phase") == "Failed")
        if is_true(jobset, "Failed"):
            blamed = self._of_failed_jobs() or cause
            if blamed is not None:
                return PlanRefused(blamed.reason, blamed.sentence)
            told = next(c for c in jobset["status"]["conditions"] if c["type"] == "Failed")
            return PlanRefused(reasons.JOBSET_FAILED, f"the JobSet failed: {told.get('message')}")
        if self._context.job.spec.suspend or _waits(jobset) or deleting(jobset):
            return None
        return (self._too_many_restarts(cause) if cause else None) or self._too_long() or self._never_started(jobset)

    def _of_failed_jobs(self) -> rootcause.Cause | None:
        """The cause, from the pods of the Job that failed first."""
        jobs = [j for j in self._children.jobs(surplus=False) if is_true(j, "Failed")]
        first = min(jobs, key=lambda j: changed_at(j, "Failed"), default=None)
        if first is None:
            return None
        name = first["metadata"]["name"]
        pods = [p for p in self._pods if label(p, names.JOB_NAME_LABEL) == name]
        return rootcause.worst(p for p in pods if p.get("status", {}).get("phase") == "Failed")

    def _too_many_restarts(self, cause: rootcause.Cause) -> PlanRefused | None:
        most = self._context.job.spec.failure_policy.max_restarts
        since = self._now - RESTART_WINDOW
        failed = sum((at := rootcause.failed_at(pod)) is not None and at > since for pod in self._pods)
        if failed <= most:
            return None
        count = f"failures of pods within an hour: {failed}, failurePolicy.maxRestarts: {most}"
        return PlanRefused(cause.reason, f"{cause.sentence} ({count})")

    def _too_long(self) -> PlanRefused | None:
        limit, started = self._context.job.spec.active_deadline_seconds, self._status.start_time
        if limit is None or started is None:
            return None
        left = limit - (self._now - started).total_seconds()  # adding the limit to a date could overflow
        if left <= 0:
            return PlanRefused(reasons.DEADLINE_EXCEEDED, f"the job ran longer than activeDeadlineSeconds, {limit} s")
        self._requeue.append(left)
        return None

    def _never_started(self, jobset: Object) -> PlanRefused | None:
        limit = self._context.start_timeout
        causes = [c for p in live(self._pods) if (c := rootcause.cause(p, self._seen.mounts)) is not None and c.waiting]
        causes += [cause] if (cause := self._refused()) is not None else []
        if limit is None or not causes:
            return None
        cause = min(causes, key=lambda c: c.since)
        since = parse_time(cause.since) or self._now
        wanted = next((c for c in self._old.conditions if c.type == "Suspended" and c.status == "False"), None)
        if self._status.start_time is None and wanted is not None:
            # Its pods may have been replaced since. A job that is tried again, or that waited for a name, could have
            # none before its JobSet was made.
            made = parse_time(jobset["metadata"].get("creationTimestamp"))
            since = min(since, max(wanted.last_transition_time, made or wanted.last_transition_time))
        left = limit - (self._now - since).total_seconds()
        if left <= 0:
            own = self._context.job.spec.failure_policy.start_timeout_seconds is not None
            named = "failurePolicy.startTimeoutSeconds" if own else "the chart's jobs.startTimeoutSeconds"
            return PlanRefused(cause.reason, f"{cause.sentence} (waited for {named}, {limit} s)")
        self._requeue.append(left)
        return None

    def _refused(self) -> rootcause.Cause | None:
        return rootcause.refused(self._children, self._seen.mounts)

    # ------------------------------------------------------------ objects

    def _supporting_objects(self) -> list[Object]:
        """The supporting objects that are missing or that somebody else changed. A claim is never changed, and neither
        is the plan of a job that has started. Objects that concern pods are made with the first pod that runs. Before
        that, each new pod would change them again."""
        found: list[Object] = []
        pods = [p for p in self._children.of(POD.kind) if p.get("status", {}).get("phase") in ("Running", "Unknown")]
        protected = self._protected(pods)
        look = look_at(self._context, self._children, started := self._jobset is not None, protected, pods)
        if (fine := self._seen.drift.fine(look)) is None:
            return found
        contested = False
        for thing in supporting_objects(self._context, but=fine):
            if (kind := thing["kind"]) == NETWORK_POLICY.kind:
                thing = while_pods_live(thing, pods)
            if kind == DISRUPTION_BUDGET.kind and not protected:
                thing = lifted(thing)
            there = self._children.get(kind, thing["metadata"]["name"])
            fixed = kind == VOLUME_CLAIM.kind or (kind == CONFIG_MAP.kind and started)
            if there is None:
                found += [thing] if pods or kind not in WITH_PODS else []
            elif not fixed and self._differs(thing, there):
                if self._may_correct(thing, there):
                    found.append(thing)
                else:
                    contested = True
            else:
                fine.add(kind)
        self._seen.drift.found(look, fine, all_fine=not (found or contested))
        return found

    def _differs(self, thing: Object, there: Object) -> bool:
        return not matches(thing, there) and not self._seen.drift.settled(thing, there)

    def _may_correct(self, thing: Object, there: Object) -> bool:
        """Whether an object that differs is corrected now. If somebody else changes it each time, it has to wait."""
        if (pause := self._seen.drift.pause(thing, there, self._now)) > 0:
            self._requeue.append(pause)
        return pause <= 0

    def _protected(self, pods: list[Object]) -> bool:
        """Whether drains take the job's pods one at a time. Nothing is left to protect if training stands, or if all
        nodes of the job are drained. A pod that finds no node would hold up the drains of other nodes for ever. `pods`
        has those that nodes run."""
        return self._whole(pods) and not all(map(self._is_taken, live(pods))) and not self._stranded()

    def _is_taken(self, pod: Object) -> bool:
        """Whether the pod's node loses it."""
        found = self._seen.leaving.get(str(pod.get("spec", {}).get("nodeName")), ())
        return source(found, lasting(pod)) != ""

    def _stranded(self) -> list[Object]:
        """The pods that have waited for a node for longer than a new node takes to come."""
        latest = self._now - timedelta(seconds=self._context.settings.stranded_seconds)
        found = [pod for pod in live(self._pods) if rootcause.unscheduled(pod)]
        return [
            pod for pod in found if (made := parse_time(pod["metadata"].get("creationTimestamp"))) and made <= latest
        ]

    def _whole(self, pods: list[Object]) -> bool:
        """Whether the coordinator and all trainers run or are done. `pods` has those that nodes run. Trainers are done
        before the coordinator has copied the models."""
        done = [p for p in self._children.of(POD.kind) if p.get("status", {}).get("phase") == "Succeeded"]
        trainers = (group for group in self._context.job.spec.groups if Role.TRAINER in group.roles)
        wanted = 1 + sum(self._context.guaranteed(group) for group in trainers)
        return sum(label(pod, names.GROUP_LABEL) not in self._rollouts() for pod in [*live(pods), *done]) >= wanted

    def _changed(self, jobset: Object) -> bool:
        """Whether the user changed images, pod templates or the number of trainers since the JobSet was made. If only
        another version of the operator would render other pods, running pods stay."""
        spec, there = self._context.job.spec, self._context.sizes
        trainers = (group for group in spec.groups if Role.TRAINER in group.roles)
        resized = any(there.get(group.name, pod_count(group)) != pod_count(group) for group in trainers)
        return resized or pods_changed(jobset["metadata"].get("labels") or {}, spec)

    def _moved(self, jobset: Object) -> bool:
        """Whether the user gave the job another queue or priority while it waits in a queue, or its class has changed.
        A job that runs keeps its place until it is suspended. A label that the user did not set may be Kueue's own: it
        puts every JobSet without a queue into the namespace's queue `default`, if there is one."""
        if not _waits(jobset) or _was_sent(self._seen.document):
            return False
        if isinstance(self._seen.job_class, PlanRefused):
            # An operator that cannot read the class does not know that it says something else now.
            return self._seen.job_class.reason in (reasons.CLASS_MISSING, reasons.CLASS_REFUSES)
        wanted = self._context.queueing() | class_labels(self._context)
        keys = (names.QUEUE_LABEL, names.PRIORITY_LABEL, names.CLASS_HASH_LABEL)
        return any(key in wanted and label(jobset, key) != wanted[key] for key in keys)

    def _surplus(self) -> tuple[list[Object], list[Ref]]:
        """The surplus rollouts to create and to delete. They start once the coordinator runs, so that they take no GPU
        that the job needs to start."""
        if not self._may_add():
            return [], []
        jobs = self._children.jobs(surplus=True)
        wanted = {j["metadata"]["name"]: j for j in surplus_jobs(self._context)}
        there = {j["metadata"]["name"] for j in jobs}
        again = {name for j in jobs if (name := j["metadata"]["name"]) in wanted and self._starts_anew(j)}
        return [j for name, j in wanted.items() if name not in there], self._surplus_gone(keep=set(wanted) - again)

    def _may_add(self) -> bool:
        """Whether the coordinator runs, and the class is known."""
        pod = progress.coordinator_pod(Children({(POD.kind, p["metadata"]["name"]): p for p in live(self._pods)}))
        runs = pod is not None and pod.get("status", {}).get("phase") == "Running"
        return runs and not isinstance(self._seen.job_class, PlanRefused)

    def _sandboxes(self) -> tuple[list[Object], list[Ref]]:
        """The sandboxes' objects to create or correct, and the Sandboxes whose pod has ended for good, which are made
        anew."""
        if not self._may_add():
            return [], []
        there = self._children.get(SERVICE.kind, names.sessions_service(self._context.name))
        address = (there or {}).get("spec", {}).get("clusterIP")
        found = list[Object]()
        for thing in sandboxes.sandbox_objects(self._context, address):
            was = self._children.get(thing["kind"], thing["metadata"]["name"])
            # A Sandbox that is changed keeps its pod.
            wrong = was is not None and thing["kind"] != SANDBOX.kind and self._differs(thing, was)
            if was is None or (wrong and self._may_correct(thing, was)):
                found.append(thing)
        over = [box for box in self._children.of(SANDBOX.kind) if is_true(box, "Finished") and not deleting(box)]
        return found, [(SANDBOX.kind, str(box["metadata"]["name"])) for box in over]

    def _sandboxes_told(self) -> str:
        """Why a sandbox is not ready."""
        for box in self._children.of(SANDBOX.kind):
            if not is_true(box, "Ready"):
                said = (condition(box, "Ready") or {}).get("message") or "agent-sandbox has not said why"
                return f"sandbox {box['metadata']['name']} is not ready: {said}"
        return ""

    def _starts_anew(self, job: Object) -> bool:
        """Whether the Job of a surplus rollout is replaced, so that the rollout works again at once. The Job itself
        would wait 10 s or more before it makes the next pod. After a pod that ended well, such as a drained one, it
        makes none. A rollout that fails by itself soon after its start keeps the Job's back-off."""
        pods = [p for p in self._children.of(POD.kind) if label(p, names.JOB_NAME_LABEL) == job["metadata"]["name"]]
        if any(deleting(p) or p.get("status", {}).get("phase") not in ("Failed", "Succeeded") for p in pods):
            return False
        if is_true(job, "Complete"):
            return True
        if not pods:
            return int(job.get("status", {}).get("failed") or 0) > 0  # somebody deleted the pod
        return rootcause.lasted(pods) >= STEADY or all(map(_may_return, pods))

    def _anew(self) -> list[Ref]:
        """The Jobs of the JobSet that are replaced. Each has one rollout, whose pod was deleted or disrupted. The
        JobSet makes such a Job again at once. The Job itself would wait 10 s after the first such pod, and up to 10
        minutes after more. A pod that failed by itself is left to the Job, and counts as a failure."""
        jobs, found = jobs_of(self._jobset), []
        for job in self._children.jobs(surplus=False):
            name = job["metadata"]["name"]
            group, size = jobs.get(name, ("", 0))
            pods = [p for p in self._children.of(POD.kind) if label(p, names.JOB_NAME_LABEL) == name]
            ended = not deleting(job) and all(is_gone(p) and _may_return(p) for p in pods)
            failed = int(job.get("status", {}).get("failed") or 0) > 0
            if group in self._rollouts() and size == 1 and ended and (pods or failed):
                found.append((JOB.kind, name))
        return found

    def _leaving(self) -> list[Ref]:
        """Pods of rollouts on nodes that will end soon. They are deleted, which drains them. A pod that was made after
        the notice tolerates it and stays."""
        ending, found = self._seen.ending, []
        for pod in live(self._children.of(POD.kind)):
            since = ending.get(str(pod.get("spec", {}).get("nodeName")))
            made = parse_time(pod["metadata"].get("creationTimestamp"))
            if (
                since is not None
                and made is not None
                and made <= since
                and label(pod, names.GROUP_LABEL) in self._rollouts()
            ):
                found.append((POD.kind, str(pod["metadata"]["name"])))
        return found

    def _rollouts(self) -> set[str]:
        """The names of the groups that only generate."""
        return {group.name for group in self._context.job.spec.groups if Role.TRAINER not in group.roles}

    def _surplus_gone(self, keep: set[str]) -> list[Ref]:
        jobs = [j for j in self._children.jobs(surplus=True) if not deleting(j)]
        return [(JOB.kind, name) for j in jobs if (name := j["metadata"]["name"]) not in keep]

    # ------------------------------------------------------------ status

    def _progress(self) -> None:
        if self._seen.reported is not None:
            self._take(progress.fields(self._seen.reported))
            self._say_health(self._seen.reported)

    def _say_health(self, document: Mapping[str, Any]) -> None:
        """Set the condition Healthy from the coordinator's verdict on the last iteration. It stays while the
        coordinator is away."""
        health = progress.health(document)
        if health is not None:
            self._conditions.set("Healthy", health.healthy, health.reason, health.message)

    def _take(self, fields: dict[str, Any]) -> None:
        """Add fields to the status."""
        merged = self._status.model_dump() | fields
        self._status = RLHFJobStatus.model_validate(merged)

    def _groups(self) -> list[GroupStatus]:
        mine = self._children.of(POD.kind)
        return [
            GroupStatus(
                name=group.name,
                desired=self._context.wanted(group),
                ready=sum(is_ready(p) and label(p, names.GROUP_LABEL) == group.name for p in mine),
            )
            for group in self._context.job.spec.groups
        ]

    def _result(
        self, apply: list[Object] | None = None, delete: list[Ref] | None = None, token: bool = False
    ) -> Reconciled:
        status = self._status.model_copy(update={"conditions": self._conditions.result()})
        requeue = max(0.1, min(*self._requeue, LATEST_SECONDS)) if self._requeue else None
        return Reconciled(status, apply or [], delete or [], requeue, self._conditions.events(), token=token)


def _again(seen: Seen, conditions: Conditions, status: RLHFJobStatus) -> Reconciled:
    """Handle a failed job that its user tries again. It stays failed until its old pods are gone. Then it starts like a
    new job. Its files stay, so it resumes from its last checkpoint."""
    old = old_status(seen.document)
    delete = _beside(seen.children)
    if (jobset := _jobset(seen)) is not None:
        delete += [] if deleting(jobset) else [(JOBSET.kind, str(jobset["metadata"]["name"]))]
        return Reconciled(old, delete=delete, requeue=AGAIN_SECONDS)
    retry = int(seen.document["spec"]["retry"])
    conditions.set("Failed", False, reasons.TRIED_AGAIN, f"spec.retry is {retry}")
    for kind in ("Scheduled", "Running"):
        conditions.set(kind, False, reasons.CREATING)  # type: ignore[arg-type]
    conditions.set("Degraded", False, reasons.AS_EXPECTED)
    conditions.set("Completed", False, reasons.IN_PROGRESS)
    fresh = {"retry": retry, "start_time": None, "completion_time": None, "conditions": conditions.result()}
    return Reconciled(status.model_copy(update=fresh), delete=delete, requeue=0.1, events=conditions.events())


def _after_the_end(seen: Seen, status: RLHFJobStatus, now: datetime) -> Reconciled:
    """Handle a job that is over. Nothing is created. A finished JobSet stays for its logs until the job is deleted. An
    unfinished one is deleted, because it holds GPUs."""
    delete = _beside(seen.children)
    unfinished = _unfinished(_jobset(seen))
    ended = status.completion_time
    if _was_sent(seen.document):
        # The cluster that sent the job deletes it when its time is up.
        left = SENT_SECONDS - (now - ended).total_seconds() if ended and unfinished else 0.0
        if left > 0:
            return Reconciled(status, delete=delete, requeue=max(0.1, left))
        return Reconciled(status, delete=[*delete, *unfinished])
    delete += unfinished
    ttl = (seen.document.get("spec") or {}).get("ttlSecondsAfterFinished")
    if ttl is None or ended is None:
        return Reconciled(status, delete=delete)
    left = int(ttl) - (now - ended).total_seconds()
    requeue = min(max(0.1, left), LATEST_SECONDS) if left > 0 else None
    return Reconciled(status, delete=delete, requeue=requeue, expired=left <= 0)


def _beside(children: Children) -> list[Ref]:
    """What makes pods beside the JobSet: Jobs of surplus rollouts, and Sandboxes."""
    found = [*children.jobs(surplus=True), *children.of(SANDBOX.kind)]
    return [(str(thing["kind"]), str(thing["metadata"]["name"])) for thing in found if not deleting(thing)]


def _may_return(pod: Object) -> bool:
    """Whether a pod that has ended may be made anew at once. One that failed, or that its node refused, may end again
    as soon."""
    return rootcause.failed_at(pod) is None and not is_refused(pod)


def _was_sent(document: Object) -> bool:
    """Whether MultiKueue sent the job here."""
    return names.ORIGIN_LABEL in (document["metadata"].get("labels") or {})


def _refused(
    seen: Seen, problem: PlanRefused, conditions: Conditions, status: RLHFJobStatus, now: datetime
) -> Reconciled:
    """Handle a job without a plan. The manifest must change, unless the planner itself failed. In that case it is asked
    again when the job has waited twice as long. A job that runs, and whose manifest was changed to one that cannot be
    read, keeps its pods. Its user may still suspend it."""
    conditions.set("Planned", False, problem.reason, problem.message)
    for kind in ("Scheduled", "Running"):
        conditions.set(kind, False, reasons.NOT_PLANNED, problem.message)  # type: ignore[arg-type]
    conditions.set("Completed", False, reasons.IN_PROGRESS)
    delete, jobset = list[Ref](), _jobset(seen)
    if jobset is not None and (seen.document.get("spec") or {}).get("suspend") is True:
        conditions.set("Suspended", True, reasons.SUSPENDED, "spec.suspend is true")
        delete = _beside(seen.children)
        delete += [] if deleting(jobset) else [(JOBSET.kind, str(jobset["metadata"]["name"]))]
    status = status.model_copy(update={"conditions": conditions.result()})
    requeue = None
    if problem.reason in (reasons.PLANNER_TIMEOUT, reasons.PLANNER_FAILED):
        since = next(c.last_transition_time for c in status.conditions if c.type == "Planned")
        requeue = max(PLANNER_AGAIN_SECONDS, (now - since).total_seconds())
    return Reconciled(status, delete=delete, requeue=requeue, events=conditions.events())


def _jobset(seen: Seen) -> Object | None:
    return seen.children.get(JOBSET.kind, str(seen.document["metadata"]["name"]))


def _unfinished(jobset: Object | None) -> list[Ref]:
    if jobset is None or deleting(jobset) or is_true(jobset, "Completed") or is_true(jobset, "Failed"):
        return []
    return [(JOBSET.kind, str(jobset["metadata"]["name"]))]
