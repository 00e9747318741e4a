"""The Workload of a job that MultiKueue sends to another cluster. It says how many pods of each kind need room."""

from __future__ import annotations

from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import WORKLOAD
from dovetail.operator.render.context import Object, RenderContext
from dovetail.operator.render.jobset import jobset


def workload(context: RenderContext) -> Object:
    """The Workload is made in the cluster of the queues, where the job does not run. Kueue copies it to the other
    clusters. There Kueue compares the copy with the JobSet that the operator makes, and the pods must be the same."""
    made = jobset(context)
    sets = []
    for job in made["spec"]["replicatedJobs"]:
        spec, copies = job["template"]["spec"], job["replicas"]
        found = {"name": job["name"], "count": copies * spec["parallelism"], "template": spec["template"]}
        if wanted := _topology(spec["template"], copies):
            found["topologyRequest"] = wanted
        sets.append(found)
    metadata = context.metadata(names.workload(context.name, context.uid), "workload")
    metadata["labels"][names.JOB_UID_LABEL] = context.uid
    queue = context.job.metadata.labels[names.QUEUE_LABEL]
    return {**WORKLOAD.type_meta, "metadata": metadata, "spec": {"queueName": queue, "podSets": sets}}


def _topology(template: Object, copies: int) -> dict[str, Any] | None:
    """The required closeness of the pods to each other, as Kueue would read it from the JobSet. It reads only the
    Workload of a job that was sent."""
    annotations = template["metadata"].get("annotations") or {}
    for how in ("required", "preferred"):
        if level := annotations.get(f"{names.KUEUE}podset-{how}-topology"):
            index = {"podIndexLabel": names.INDEX_ANNOTATION, "subGroupIndexLabel": names.REPLICA_ANNOTATION}
            return {how: level, **index, "subGroupCount": copies}
    return None
