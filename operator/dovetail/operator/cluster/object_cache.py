"""Keeps the objects that the watches have reported, in the newest known version of every RLHFJob and of its
children."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from dovetail.kube import names
from dovetail.kube.owners import controller
from dovetail.kube.resources import CONFIG_MAP, JOB, JOBSET, POD, POD_GROUP, SANDBOX
from dovetail.manifest.types import KIND
from dovetail.operator.reconcile.children import Children, Object, Ref, is_true, label, managed_elsewhere
from dovetail.operator.reconcile.disruption import lasting

Key = tuple[str, str]  # namespace and name of an RLHFJob
# The fields that are read of the most numerous objects of a job. JobSet repeats its labels as annotations, too.
_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_LABELS = ("dovetail.dev/", names.KUEUE, names.JOB_NAME_LABEL, names.INDEX_ANNOTATION)
_STATUS = {
    POD.kind: ("phase", "podIP", "reason", "message", "conditions", "containerStatuses"),
    JOB.kind: ("failed", "conditions"),
    JOBSET.kind: ("conditions",),
    SANDBOX.kind: ("conditions",),
}
_OWNER = ("apiVersion", "kind", "name", "uid", "controller")
# The limits of an RLHFJob's spec. A value takes up to 25 times as much memory as JSON, and the operator has copies.
SPEC_BYTES, SPEC_VALUES = 256 << 10, 10_000
MOST_LABELS = 500
EDITS = (0, 256, 8)  # labels, bytes and values that an edit may add to a job that is too large, but was accepted before
TOO_LARGE = "tooLarge"
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
# The fields that are still read of a job that is too large, or over.
_SPEC = ("managedBy", "suspend", "retry", "ttlSecondsAfterFinished", "storage")
_SMALL = 1 << 10  # characters; compressing less is not worth it
# The keys of ConfigMaps that are kept.
_DATA = ("job.json", "plan.json", names.ITERATIONS_KEY)
_CONTAINER_STATUS = ("name", "image", "state")


class _Kept(NamedTuple):
    """An object as JSON text, compressed if it is long. Dicts take 4 to 25 times as much memory as their text. It is
    parsed when the job is reconciled."""

    version: int
    uid: str
    text: str | bytes

    @staticmethod
    def of(thing: Object, version: int) -> _Kept:
        text = json.dumps(thing, separators=(",", ":"))
        kept = text if len(text) < _SMALL else zlib.compress(text.encode(), 1)
        return _Kept(version, str(thing["metadata"].get("uid", "")), kept)

    def parsed(self) -> Object:
        text = self.text if isinstance(self.text, str) else zlib.decompress(self.text)
        return dict(json.loads(text))


class ObjectCache:
    """The cache is filled by watch events and by the replies to the operator's own writes. An older version never
    replaces a newer one."""

    def __init__(self) -> None:
        self._jobs: dict[Key, _Kept] = {}
        self._children: dict[Key, dict[Ref, _Kept]] = {}

    def put(self, thing: Object) -> Key | None:
        """Store an object. Returns its job, or None if it belongs to no job."""
        key = key_of(thing)
        if key is None:
            return None
        version = _version(thing)
        if thing["kind"] == KIND:
            job = self._jobs.get(key)
            if job is None or job.version <= version:
                self._jobs[key] = _Kept.of(_trim_job(thing, lambda: self.job(key)), version)
            return key
        slot, place = self._children.setdefault(key, {}), _place(thing)
        there = slot.get(place)
        if there is None or there.version <= version:
            slot[place] = _Kept.of(trim(thing), version)
        return key

    def knows(self, thing: Object) -> bool:
        """Whether this version of the object, or a newer one, is stored."""
        key = key_of(thing)
        if key is None:
            return False
        if thing["kind"] == KIND:
            job = self._jobs.get(key)
            return job is not None and job.version >= _version(thing) > 0
        there = self._children.get(key, {}).get(_place(thing))
        return there is not None and there.version >= _version(thing) > 0

    def remove(self, thing: Object) -> Key | None:
        """Remove an object, unless a newer one with the same name is known."""
        key = key_of(thing)
        if key is None:
            return None
        uid = str(thing["metadata"].get("uid", ""))
        if thing["kind"] == KIND:
            job = self._jobs.get(key)
            if job is not None and job.uid == uid:
                del self._jobs[key]
            return key
        slot, place = self._children.get(key, {}), _place(thing)
        if place in slot and slot[place].uid == uid:
            del slot[place]
        if not slot:
            self._children.pop(key, None)
        return key

    def job(self, key: Key) -> Object | None:
        kept = self._jobs.get(key)
        return None if kept is None else kept.parsed()

    def jobs(self) -> list[Key]:
        return sorted(self._jobs)

    def children(self, key: Key) -> Children:
        """All objects that have the job's name as a label, whoever made them."""
        return Children({place: kept.parsed() for place, kept in self._children.get(key, {}).items()})

    def uids(self, kind: str, namespace: str | None) -> dict[tuple[Key, str], str]:
        """The uids of all objects of a kind by job and name, to compare them with a list."""
        if kind == KIND:
            jobs = ((key, job) for key, job in self._jobs.items() if namespace in (None, key[0]))
            return {(key, key[1]): job.uid for key, job in jobs}
        return {
            (key, name): kept.uid
            for key, slot in self._children.items()
            if namespace in (None, key[0])
            for (k, name), kept in slot.items()
            if k == kind
        }


def _place(thing: Object) -> Ref:
    return thing["kind"], thing["metadata"]["name"]


def key_of(thing: Object) -> Key | None:
    metadata = thing["metadata"]
    name = metadata["name"] if thing["kind"] == KIND else label(thing, names.JOB_LABEL)
    return (metadata["namespace"], name) if name else None


def trim(thing: Object) -> Object:
    """The object without the fields that nobody reads. These fields are most of a pod, a Job and a JobSet. If the
    object belongs to no job, only the fields that identify it are kept, because anybody may label objects of any size
    as a job's."""
    metadata, kind = thing["metadata"], thing["kind"]
    if kind == KIND:
        return _trim_job(thing)
    if kind not in _STATUS and _is_a_jobs(thing):
        kept = {**thing, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}
        if kind == CONFIG_MAP.kind:
            kept["data"] = _only(thing.get("data") or {}, _DATA)
        return kept
    labels = (metadata.get("labels") or {}).items()
    kept = _only(metadata, _METADATA) | {"labels": {key: v for key, v in labels if key.startswith(_LABELS)}}
    if owner := controller(thing):
        kept["ownerReferences"] = [_only(owner, _OWNER)]
    status = _only(thing.get("status") or {}, _STATUS.get(kind, ()))
    if "containerStatuses" in status:
        status["containerStatuses"] = [_only(c, _CONTAINER_STATUS) for c in status["containerStatuses"] or ()]
    spec = thing.get("spec") or {}
    spec = _sizes_only(spec) if kind == JOBSET.kind else _only(spec, ("nodeName",) if kind == POD.kind else ())
    if kind == POD.kind and (tolerations := lasting(thing)):
        spec["tolerations"] = tolerations
    return {"kind": kind, "metadata": kept, "spec": spec, "status": status}


def _trim_job(job: Object, before: Callable[[], Object | None] = lambda: None) -> Object:
    """The job without the fields that nobody reads any more, if it is too large or over. A job whose plan was made is
    kept whole, and its user may edit it as long as it does not grow. `before` returns the job as it is stored."""
    annotations = _only(job["metadata"].get("annotations") or {}, (names.WORKLOAD_LABEL,))
    kept = {**job, "metadata": _only(job["metadata"], (*_METADATA, "labels")) | {"annotations": annotations}}
    spec = job.get("spec") or {}
    if (problem := _too_large(job)) is None:
        if _rests(job):
            # Its groups name Jobs that it may still have.
            groups = [_only(group, ("name",)) for group in spec.get("groups") or ()]
            kept |= {"spec": _only(spec, _SPEC) | {"groups": groups}}
        return kept
    if not (_was_planned(job) or _kept_its_size(job, before())):
        labels = _only(job["metadata"].get("labels") or {}, (names.ORIGIN_LABEL, names.QUEUE_LABEL))
        kept["metadata"]["labels"] = labels
        kept |= {"spec": _only(spec, _SPEC), TOO_LARGE: problem}
    return kept


def _rests(job: Object) -> bool:
    """Whether the job is over and its user has not tried it again. A user who edits it sends the whole manifest."""
    status, spec = job.get("status") or {}, job.get("spec") or {}
    if managed_elsewhere(job) or not (is_true(job, "Completed") or is_true(job, "Failed")):
        return False
    return int(spec.get("retry") or 0) <= int(status.get("retry") or 0)


def _was_planned(job: Object) -> bool:
    """Whether an operator has planned exactly this manifest. If an earlier release planned it, the job goes on."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    now = job["metadata"].get("generation")
    return any((c["type"], c["status"], c.get("observedGeneration")) == ("Planned", "True", now) for c in conditions)


def _kept_its_size(job: Object, before: Object | None) -> bool:
    """Whether the job is an edit of one that was accepted, and not much larger. An edit that suspends or scales a job
    adds a few characters."""
    if before is None or TOO_LARGE in before or before["metadata"].get("uid") != job["metadata"].get("uid"):
        return False
    return all(now <= then + more for now, then, more in zip(_size(job), _size(before), EDITS, strict=True))


def _size(job: Object) -> tuple[int, int, int]:
    """The number of labels, of bytes and of values."""
    text = json.dumps(job.get("spec") or {}, separators=(",", ":"))
    return len(job["metadata"].get("labels") or {}), len(text), values_of(text)


def _too_large(job: Object) -> str | None:
    """A sentence if the manifest would take too much of the operator's memory."""
    if (labels := len(job["metadata"].get("labels") or {})) > MOST_LABELS:
        return f"metadata.labels has {labels} labels; at most {MOST_LABELS} are taken. Remove some."
    text = json.dumps(job.get("spec") or {}, separators=(",", ":"))
    if (values := values_of(text)) > SPEC_VALUES:
        values = values_of(_TEXT.sub("", text))  # commas of scripts are no values
    if len(text) <= SPEC_BYTES and values <= SPEC_VALUES:
        return None
    return (
        f"spec has {len(text) >> 10} KiB and about {values} values; at most {SPEC_BYTES >> 10} KiB and {SPEC_VALUES} "
        "values are taken. Make it shorter, podTemplate above all."
    )


def values_of(text: str) -> int:
    """The approximate number of values in a JSON text. Each value except the first follows a comma or an opening
    bracket."""
    return sum(text.count(mark) for mark in ",[{")


def _is_a_jobs(thing: Object) -> bool:
    """Whether the object makes no pods and has the name that its job gives to such an object."""
    name, job = thing["metadata"]["name"], label(thing, names.JOB_LABEL)
    if thing["kind"] == POD_GROUP:
        return re.fullmatch(re.escape(job) + "-[0-9a-f]{8}", name) is not None
    return name in {
        job,
        names.plan_config_map(job),
        names.history_config_map(job),
        names.volume_claim(job),
        names.account(job),
        names.coordinator_service(job),
        names.sandbox_policy(job),
        names.sessions_service(job),
    }


def _only(thing: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: thing[key] for key in keys if key in thing}


def _sizes_only(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a JobSet that are read. They say whether it is suspended, and have the number of pods and the images
    of each Job."""

    def kept(job: Mapping[str, Any]) -> dict[str, Any]:
        # The schema of JobSets lets a template be empty.
        pods = job["template"].get("spec") or {}
        containers = pods.get("template", {}).get("spec", {}).get("containers") or ()
        pod = {"spec": {"containers": [_only(container, ("name", "image")) for container in containers]}}
        return {"completions": pods.get("completions", 1), "template": pod}

    jobs = [
        {"name": job["name"], "replicas": job.get("replicas", 1), "template": {"spec": kept(job)}}
        for job in spec.get("replicatedJobs") or ()
    ]
    return {"suspend": bool(spec.get("suspend")), "replicatedJobs": jobs}


def _version(thing: Mapping[str, Any]) -> int:
    """Resource versions are numbers that grow: https://kubernetes.io/docs/reference/using-api/api-concepts."""
    text = str(thing["metadata"].get("resourceVersion", "0"))
    return int(text) if text.isdigit() else 0
