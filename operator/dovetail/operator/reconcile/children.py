"""The objects that exist for a job. It reads facts from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dovetail.kube import names
from dovetail.kube.owners import controlled_by, controller, labelled_for
from dovetail.kube.resources import JOB, JOBSET, POD, VOLUME_CLAIM
from dovetail.protocol.process.process_names import CONTAINER

Object = Mapping[str, Any]
Ref = tuple[str, str]  # kind and name
# The maximum number of owners between an object and its RLHFJob.
_DEPTH = {JOB.kind: 1, POD.kind: 2}
# Why a kubelet refuses a pod that another node could take, or this one later. For other reasons, such as a forbidden
# sysctl, it would refuse the next pod, too.
_OF_NODE = re.compile(
    "Evicted|NodeAffinity|NodeShutdown|OutOf.+|UnexpectedAdmissionError|VolumeAttachmentLimitExceeded"
)
_REFUSED = "Pod was rejected: "


def parse_time(text: str | None) -> datetime | None:
    """A Kubernetes timestamp."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def condition(thing: Object, kind: str) -> Object | None:
    """The condition of that type. None if there is none."""
    found = (thing.get("status") or {}).get("conditions") or []
    return next((c for c in found if c.get("type") == kind), None)


def is_true(thing: Object, kind: str) -> bool:
    return (condition(thing, kind) or {}).get("status") == "True"


def managed_elsewhere(document: Object) -> bool:
    """Whether another controller runs the job, such as MultiKueue in another cluster. This operator does not write its
    status then."""
    return ((document.get("spec") or {}).get("managedBy") or names.MANAGER) != names.MANAGER


def changed_at(thing: Object, kind: str) -> str:
    """The time when the condition of that type last changed. The condition must exist."""
    return str((condition(thing, kind) or {}).get("lastTransitionTime", ""))


def label(thing: Object, key: str) -> str:
    return str((thing["metadata"].get("labels") or {}).get(key, ""))


def deleting(thing: Object) -> bool:
    return bool(thing["metadata"].get("deletionTimestamp"))


@dataclass(frozen=True)
class Children:
    """Objects by kind and name."""

    objects: Mapping[Ref, Object] = field(default_factory=dict)

    def of_job(self, uid: str) -> Children:
        """The objects that this RLHFJob controls, directly or through a JobSet or Job of its own. A claim that will
        outlive the job has no controller, and has the job's uid as a label."""
        mine: dict[Ref, Object] = {}
        owners = set[str]()
        places = sorted(self.objects, key=lambda place: _DEPTH.get(place[0], 0))
        for place in places:
            thing = self.objects[place]
            kept = place[0] == VOLUME_CLAIM.kind and labelled_for(thing, uid)
            if controlled_by(thing, uid) or kept or controller(thing).get("uid") in owners:
                mine[place] = thing
                if place[0] in (JOBSET.kind, JOB.kind):
                    owners.add(str(thing["metadata"].get("uid")))
        return Children(mine)

    def get(self, kind: str, name: str) -> Object | None:
        return self.objects.get((kind, name))

    def of(self, kind: str) -> list[Object]:
        """All objects of a kind, ordered by name."""
        return [thing for (k, _), thing in sorted(self.objects.items(), key=lambda item: item[0]) if k == kind]

    def pods(self, *, surplus: bool) -> list[Object]:
        return [pod for pod in self.of(POD.kind) if bool(label(pod, names.SURPLUS_LABEL)) == surplus]

    def jobs(self, *, surplus: bool) -> list[Object]:
        return [job for job in self.of(JOB.kind) if bool(label(job, names.SURPLUS_LABEL)) == surplus]


def is_ready(pod: Object) -> bool:
    return is_true(pod, "Ready") and not deleting(pod)


def is_over(pod: Object) -> bool:
    """Whether the pod has ended, or is being deleted."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed") or deleting(pod)


def is_gone(pod: Object) -> bool:
    """Whether the pod has ended and nothing of it runs any more."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed") and not deleting(pod)


def is_refused(pod: Object) -> bool:
    """Whether the pod's node would not take it, or not again after its kubelet was restarted, for a reason of the node.
    The kubelet sets no condition DisruptionTarget then."""
    status = pod.get("status", {})
    told = str(status.get("message") or "").startswith(_REFUSED)
    return status.get("phase") == "Failed" and told and _OF_NODE.fullmatch(str(status.get("reason"))) is not None


def is_disrupted(pod: Object) -> bool:
    """Whether the cluster ended the pod. That is no failure of the job."""
    return is_true(pod, "DisruptionTarget") or is_refused(pod)


def live(pods: Iterable[Object]) -> list[Object]:
    return [pod for pod in pods if not is_over(pod)]


def sizes(jobset: Object | None) -> dict[str, int]:
    """The number of pods of each group in a JobSet. The coordinator's is included."""
    found = Counter[str]()
    for group, pods in jobs_of(jobset).values():
        found[group] += pods
    return dict(found)


def jobs_of(jobset: Object | None) -> dict[str, tuple[str, int]]:
    """The names of the Jobs that a JobSet makes, with the group and the number of pods of each."""
    if jobset is None:
        return {}
    name = jobset["metadata"]["name"]
    return {
        f"{name}-{j['name']}-{i}": (str(j["name"]), int(j["template"]["spec"].get("completions", 1)))
        for j in jobset["spec"]["replicatedJobs"]
        for i in range(int(j.get("replicas", 1)))
    }


def images(jobset: Object | None) -> dict[str, str]:
    """The image of each group in a JobSet, if it is known. The coordinator's is included."""
    found = {}
    for job in jobset["spec"]["replicatedJobs"] if jobset is not None else []:
        for container in job["template"]["spec"].get("template", {}).get("spec", {}).get("containers", []):
            if container["name"] == CONTAINER:
                found[job["name"]] = container["image"]
    return found


def matches(wanted: Any, actual: Any) -> bool:
    """Whether `actual` agrees with `wanted`. `actual` may have more fields, which the API server adds. Lists must have
    the same length, so an item that somebody added to a list of ours is a difference."""
    if isinstance(wanted, Mapping):
        return isinstance(actual, Mapping) and all(matches(value, actual.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(actual, list)
            and len(wanted) == len(actual)
            and all(matches(w, a) for w, a in zip(wanted, actual, strict=True))
        )
    return bool(wanted == actual)
