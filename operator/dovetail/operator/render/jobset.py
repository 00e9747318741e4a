"""The JobSet: coordinator, trainers and the rollouts that the job cannot start without. Kueue admits all or nothing."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import JOBSET
from dovetail.operator.render.context import Object, RenderContext, digest
from dovetail.operator.render.job import job_spec
from dovetail.operator.render.pod import coordinator_pod, group_pod
from dovetail.protocol.exit_codes import BAD_CONFIGURATION, JOB_FAILED
from dovetail.protocol.process_names import COORDINATOR


def pods_hash(context: RenderContext) -> str:
    """A hash of the images and pod templates in the manifest, which may change while the job is suspended."""
    return digest([[group.image, group.pod_template] for group in context.job.spec.groups])[:16]


def jobset(context: RenderContext) -> Object:
    """Success is the coordinator's; a Job that failed for good fails the whole. Programs wait for each other, so
    nothing here says in which order they start."""
    final = (BAD_CONFIGURATION, JOB_FAILED)
    jobs = [(COORDINATOR, job_spec(coordinator_pod(context), 1, hopeless=final))]
    jobs += [
        (group.name, job_spec(group_pod(context, group), context.guaranteed(group)))
        for group in context.job.spec.groups
    ]
    metadata = context.metadata(context.name, "jobset")
    metadata["labels"] |= context.queueing() | {names.PODS_LABEL: pods_hash(context)}
    return {
        **JOBSET.type_meta,
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": False},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [COORDINATOR]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": name,
                    "replicas": 1,
                    "template": {"metadata": {"labels": context.labels(name)}, "spec": spec},
                }
                for name, spec in jobs
            ],
        },
    }
