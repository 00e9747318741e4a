"""Finds out why pods do not run. It gives a reason, and a sentence that names the pod, its exit code and its last
line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from dovetail.kube import names
from dovetail.kube.resources import JOB, JOBSET, POD, VOLUME_CLAIM
from dovetail.manifest.types import Role
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import (
    Children,
    Object,
    condition,
    deleting,
    is_disrupted,
    is_ready,
    is_true,
    jobs_of,
    label,
    parse_time,
)
from dovetail.operator.reconcile.queueing import LONGEST_MESSAGE
from dovetail.operator.reconcile.refusals import taken
from dovetail.protocol.process.process_names import CONTAINER, COORDINATOR

_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONFIG = ("CreateContainerConfigError",)
_TAKEN = re.compile(r'jobs\.batch "([^"]+)" already exists')
# The words of kubelets and the scheduler for objects that the manifest names and the namespace lacks.
_NO_CONFIG = re.compile(r'\b(?:secret|configmap) "[^"]*" not found|references non-existent (?:secret|config) key')
_NO_CLAIM = re.compile(r'\bpersistentvolumeclaim "[^"]*" not found')
NO_MOUNTS: Mapping[str, str] = {}
# These are reasons of Events.
UNMOUNTED = ("FailedAttachVolume", "FailedMount")
_UNBOUND = ("FailedBinding", "ProvisioningFailed")
_CREATING = ("ContainerCreating", "PodInitializing")
# Only Events tell some causes. These are looked for when something has been stuck for this many seconds.
LOOK_SECONDS = 10.0
# A pod may wait for a node for days.
LOOK_SELDOM_SECONDS = 60.0


@dataclass(frozen=True)
class Cause:
    """The cause of a problem. `since` is a Kubernetes timestamp, for ordering. `waiting` says that the pod has not
    started, and may do so by itself."""

    reason: str
    sentence: str
    since: str
    waiting: bool


@dataclass(frozen=True)
class LostNode:
    """A node that is not ready. `since` is a Kubernetes timestamp. `told` says what is wrong with it, as words that
    follow its name."""

    since: str
    told: str


NO_NODES: Mapping[str, LostNode] = {}


def lost_node(node: Object) -> LostNode | None:
    """The problem of the node. None if it is ready, or so new that nobody knows."""
    ready = condition(node, "Ready")
    if ready is None or ready.get("status") == "True":
        return None
    since = str(ready.get("lastTransitionTime") or "")
    if ready.get("status") == "Unknown":
        return LostNode(since, f"has not answered since {since}")
    return LostNode(since, f"is not ready since {since}: {str(ready.get('message'))[: LONGEST_MESSAGE // 2]}")


def cause(pod: Object, mounts: Mapping[str, str], lost: Mapping[str, LostNode] = NO_NODES) -> Cause | None:
    """The reason why this pod does not work. None if nothing is wrong. `mounts` has reports about volumes, by the pod's
    uid. `lost` has nodes that are not ready, by name."""
    status = pod.get("status", {})
    node = str(pod.get("spec", {}).get("nodeName"))
    if (away := lost.get(node)) is not None and status.get("phase") in ("Pending", "Running") and not is_ready(pod):
        # Kubernetes deletes such a pod after five minutes. The pod is gone when its node says so, or when its node is
        # deleted.
        text = (
            f"{_who(pod)} is on node {node}, which {away.told}; if the node does not come back, delete it "
            f"(kubectl delete node {node}), and the pod starts on another one"
        )
        return Cause(reasons.NODE_LOST, text, away.since, False)
    if status.get("phase") == "Failed":
        # A pod that somebody deleted ends with an exit code, too.
        return None if deleting(pod) and not is_true(pod, "DisruptionTarget") else _ended(pod)
    if deleting(pod) and is_true(pod, "DisruptionTarget"):
        return _ended(pod)  # preempted or evicted: it has a moment left
    if is_ready(pod) or status.get("phase") == "Succeeded" or deleting(pod):
        return None
    created = pod["metadata"].get("creationTimestamp", "")
    scheduled = condition(pod, "PodScheduled")
    if scheduled and scheduled.get("status") == "False":
        if scheduled.get("reason") == "SchedulingGated":
            return None
        text = f"{_who(pod)} cannot be scheduled: {scheduled.get('message') or scheduled.get('reason')}"
        if said := mounts.get(_uid(pod)):
            text += f"; {said}"  # from an autoscaler, or about a claim that was made for the pod
        reason = reasons.CLAIM_MISSING if _NO_CLAIM.search(text) else reasons.UNSCHEDULABLE
        return Cause(reason, text[:LONGEST_MESSAGE], created, True)
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        said = waiting.get("message") or waiting.get("reason", "")
        if waiting.get("reason") in _IMAGE:
            text = f"{_who(pod)} cannot get its image {container.get('image')}: {said}"
            return Cause(reasons.IMAGE_PULL, text[:LONGEST_MESSAGE], created, True)
        if waiting.get("reason") in _CONFIG:
            return Cause(reasons.CONFIG_MISSING, f"{_who(pod)} cannot start: {said}"[:LONGEST_MESSAGE], created, True)
    if told := mounts.get(str(pod["metadata"].get("uid"))):
        reason = reasons.CONFIG_MISSING if _NO_CONFIG.search(told) else reasons.MOUNT_FAILED
        return Cause(reason, f"{_who(pod)} waits for a volume: {told}"[:LONGEST_MESSAGE], created, True)
    return None


def creating(pod: Object) -> bool:
    """Whether the pod has a node and its containers are still being created."""
    status = pod.get("status", {})
    if status.get("phase") != "Pending" or deleting(pod) or not is_true(pod, "PodScheduled"):
        return False
    states = [c.get("state", {}).get("waiting") or {} for c in status.get("containerStatuses") or []]
    return all(state.get("reason") in _CREATING for state in states)


def lacking(children: Children) -> list[Object]:
    """The Jobs of a running JobSet that have fewer pods than they should."""
    found: list[Object] = []
    for jobset in children.of(JOBSET.kind):
        if jobset["spec"].get("suspend") or deleting(jobset):
            continue
        pods = Counter(label(pod, names.JOB_NAME_LABEL) for pod in children.of(POD.kind) if not deleting(pod))
        for name, (_, size) in jobs_of(jobset).items():
            job = children.get(JOB.kind, name)
            if job is None or is_true(job, "Failed") or is_true(job, "Complete"):
                continue
            if pods[job["metadata"]["name"]] < size:
                found.append(job)
    return found


def jobless(children: Children) -> list[Object]:
    """JobSets that run and lack Jobs of their own."""
    return [
        jobset
        for jobset in children.of(JOBSET.kind)
        if not jobset["spec"].get("suspend")
        and not deleting(jobset)
        and not any(is_true(jobset, kind) for kind in ("Completed", "Failed"))
        and any(children.get(JOB.kind, name) is None for name in jobs_of(jobset))
    ]


def stuck(children: Children, claims: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """The objects that are stuck, by uid, and the reasons of the Events that may say why. `claims` has the claims that
    the pods name. While a pod gets no node, these are asked about by kind and name."""
    found: dict[str, tuple[str, ...]] = {}
    for pod in children.of(POD.kind):
        if creating(pod):
            found[_uid(pod)] = UNMOUNTED
        elif unscheduled(pod):
            found[_uid(pod)] = ("FailedBinding", "NotTriggerScaleUp", "ProvisioningFailed", "TriggeredScaleUp")
    found |= {_uid(job): ("FailedCreate",) for job in lacking(children)}
    found |= {_uid(jobset): ("JobCreationFailed",) for jobset in jobless(children)}
    found |= {_uid(claim): _UNBOUND for claim in unbound(children)}
    if waiting_pods(children):
        found |= {f"{VOLUME_CLAIM.kind} {name}": _UNBOUND for name in claims}
    return found


def waiting_pods(children: Children) -> dict[str, str]:
    """Names of the pods that wait for a node, by uid."""
    return {_uid(pod): pod["metadata"]["name"] for pod in children.of(POD.kind) if unscheduled(pod)}


def claim_of(about: str, pods: Mapping[str, str]) -> str | None:
    """The uid of the pod for which a claim was made from a template in the pod (`volumes[].ephemeral`). `about` is kind
    and name of a claim. `pods` has names by uid. A claim is named after its pod."""
    kind, _, name = about.partition(" ")
    if kind != VOLUME_CLAIM.kind:
        return None
    return next((uid for uid, pod in pods.items() if name.startswith(f"{pod}-")), None)


def unbound(children: Children) -> list[Object]:
    """Claims of the job that have no volume while pods want them."""
    pods = any(unscheduled(pod) for pod in children.of(POD.kind))
    return [c for c in children.of(VOLUME_CLAIM.kind) if pods and c.get("status", {}).get("phase") == "Pending"]


def unscheduled(pod: Object) -> bool:
    """Whether the scheduler has found no node for the pod so far."""
    told = condition(pod, "PodScheduled") or {}
    return told.get("status") == "False" and told.get("reason") != "SchedulingGated" and not deleting(pod)


def claims_told(children: Children, told: Mapping[str, str]) -> str:
    """The reason why a claim has no volume. Empty if nobody complains about one. For a claim of the job's own the
    sentence names its class and what it asks for."""
    for claim in unbound(children):
        if said := told.get(_uid(claim)):
            spec = claim.get("spec", {})
            asked = ", ".join(spec.get("accessModes") or ())
            size = spec.get("resources", {}).get("requests", {}).get("storage", "?")
            named = spec.get("storageClassName")
            kind = f"class {named}" if named else "the cluster's default class"
            text = f"PersistentVolumeClaim {claim['metadata']['name']} ({asked}, {size}, {kind}) has no volume: {said}"
            if "ReadWriteMany" in asked:
                text += (
                    "; pods on several nodes need ReadWriteMany: choose a class that has it "
                    "(jobs.volume.storageClass), or ReadWriteOnce (jobs.volume.accessMode) if one node runs the job"
                )
            return text
    return next((said for about, said in told.items() if about.startswith(f"{VOLUME_CLAIM.kind} ")), "")


def _uid(thing: Object) -> str:
    return str(thing["metadata"].get("uid"))


def refused(children: Children, told: Mapping[str, str]) -> Cause | None:
    """The reason why a Job may not make its pods (a quota, Pod Security, a missing class or account), or why a JobSet
    cannot make its Jobs. `told` has the messages of their controllers, by uid."""
    for jobset in jobless(children):
        if said := told.get(_uid(jobset)):
            since = str(jobset["metadata"].get("creationTimestamp", ""))
            if names_there := _TAKEN.findall(said):
                return Cause(reasons.NAME_CONFLICT, taken([(JOB.kind, name) for name in names_there]), since, True)
            text = f"JobSet {jobset['metadata']['name']} cannot make its Jobs: {said}"
            return Cause(reasons.PODS_REFUSED, text[:LONGEST_MESSAGE], since, True)
    for job in lacking(children):
        if said := told.get(str(job["metadata"].get("uid"))):
            text = f"Job {job['metadata']['name']} cannot make its pods: {said.removeprefix('Error creating: ')}"
            since = str(job["metadata"].get("creationTimestamp", ""))
            return Cause(reasons.PODS_REFUSED, text[:LONGEST_MESSAGE], since, True)
    return None


def failed_at(pod: Object) -> datetime | None:
    """The time when the pod failed by itself. None if it has not failed, was deleted, or was disrupted (it was evicted
    or preempted, its node was lost, or refused it)."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed" or deleting(pod) or is_disrupted(pod):
        return None
    ends = [c.get("state", {}).get("terminated") or {} for c in status.get("containerStatuses") or []]
    at = max((end["finishedAt"] for end in ends if end.get("finishedAt")), default=None)
    return parse_time(at or pod["metadata"].get("creationTimestamp"))


def lasted(pods: Iterable[Object]) -> timedelta:
    """The time that the container of the pod that ended last had run."""
    spans = []
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses") or []:
            end = container.get("state", {}).get("terminated") or {}
            start, finish = parse_time(end.get("startedAt")), parse_time(end.get("finishedAt"))
            if start is not None and finish is not None:
                spans.append((finish, finish - start))
    return max(spans)[1] if spans else timedelta()


def worst(
    pods: Iterable[Object], mounts: Mapping[str, str] = NO_MOUNTS, lost: Mapping[str, LostNode] = NO_NODES
) -> Cause | None:
    """The cause to report. It is a lost node, or else the latest failure (the job survived earlier ones), or else the
    oldest wait."""
    found = [c for pod in pods if (c := cause(pod, mounts, lost)) is not None]
    failures = [c for c in found if not c.waiting]
    if failures:
        return max(failures, key=lambda c: (c.reason == reasons.NODE_LOST, c.since))
    return min(found, key=lambda c: c.since, default=None)


def _ended(pod: Object) -> Cause:
    status = pod["status"]
    since = created = pod["metadata"].get("creationTimestamp", "")
    # A pod that exceeds its own limit of storage gets no condition from the kubelet.
    evicted = is_disrupted(pod) or status.get("reason") == "Evicted"
    for container in status.get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated")
        if not ended:
            continue
        code, since = ended.get("exitCode"), ended.get("finishedAt") or created
        if evicted:
            break
        if ended.get("reason") == "OOMKilled":
            limit = "its memory limit"
            text = f"{_who(pod)} used more memory than {limit} allows (exit code {code}); raise it in the podTemplate"
            return Cause(reasons.OUT_OF_MEMORY, text, since, False)
        # Other containers are the user's, who may have pointed the kubelet at any file.
        last = _last_line(ended.get("message") or "") if container.get("name") == CONTAINER else ""
        text = f"{_who(pod)} failed with exit code {code}" + (f": {last}" if last else "")
        return Cause(_failed(pod), text, since, False)
    told = condition(pod, "DisruptionTarget") or {}
    why = (
        status.get("message") or told.get("message") or status.get("reason") or told.get("reason") or "no reason given"
    )
    reason = reasons.EVICTED if told or evicted else reasons.POD_FAILED
    text = f"{_who(pod)} was ended: {str(why).strip()}"[:LONGEST_MESSAGE]
    return Cause(reason, text, told.get("lastTransitionTime", since), False)


def _failed(pod: Object) -> str:
    role = label(pod, names.ROLE_LABEL)
    if role == COORDINATOR:
        return reasons.COORDINATOR_FAILED
    if role == Role.ROLLOUT.value:
        return reasons.ROLLOUT_FAILED
    return reasons.TRAINER_FAILED if role == Role.TRAINER.value else reasons.POD_FAILED


def _who(pod: Object) -> str:
    group = label(pod, names.GROUP_LABEL)
    return f"pod {pod['metadata']['name']}" + (f" of group {group}" if group else "")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-LONGEST_MESSAGE:] if lines else ""
