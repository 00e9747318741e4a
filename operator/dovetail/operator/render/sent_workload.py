"""The Workload of a job that MultiKueue sends to another cluster: how many pods of which kind it needs room for."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import WORKLOAD
from dovetail.operator.render.context import Object, RenderContext
from dovetail.operator.render.jobset import jobset


def workload(context: RenderContext) -> Object:
    """Made in the cluster of the queues, where the job does not run. Kueue copies it to the other clusters. There it
    compares the copy with the JobSet that the operator makes: the pods must be the same."""
    made = jobset(context)
    sets = []
    for job in made["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        sets.append({"name": job["name"], "count": job["replicas"] * spec["parallelism"], "template": spec["template"]})
    metadata = context.metadata(names.workload(context.name, context.uid), "workload")
    metadata["labels"][names.JOB_UID_LABEL] = context.uid
    queue = context.job.metadata.labels[names.QUEUE_LABEL]
    return {**WORKLOAD.type_meta, "metadata": metadata, "spec": {"queueName": queue, "podSets": sets}}
