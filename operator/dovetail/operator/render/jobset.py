"""The JobSet: coordinator, trainers and the rollouts that the job cannot start without. Kueue admits all or nothing."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import JOBSET
from dovetail.manifest.types import Coordinator
from dovetail.operator.render.context import Object, RenderContext, digest
from dovetail.operator.render.job import job_spec
from dovetail.operator.render.pod import coordinator_pod, group_pod
from dovetail.protocol.exit_codes import BAD_CONFIGURATION, JOB_FAILED
from dovetail.protocol.process_names import COORDINATOR


def pods_hash(context: RenderContext) -> str:
    """A hash of the images and pod templates in the manifest, which may change while the job is suspended."""
    spec = context.job.spec
    pods: list[object] = [[group.image, group.pod_template] for group in spec.groups]
    # What has its default adds nothing, so that jobs of an earlier release keep their pods.
    if spec.coordinator != Coordinator():
        pods.append({"coordinator": spec.coordinator.model_dump(mode="json")})
    if (spec.hub.token_secret, spec.hub.cache_claim) != (None, None):
        pods.append({"hub": spec.hub.model_dump(mode="json", include={"token_secret", "cache_claim"})})
    return digest(pods)[:16]


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
