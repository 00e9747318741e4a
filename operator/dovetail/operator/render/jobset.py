"""The JobSet of coordinator, trainers and the rollouts without which the job cannot start. Kueue admits all or
nothing. Also the Jobs of surplus rollouts, which are those beyond a group's minimum, and the Workload of a job that
MultiKueue sends to another cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.kube import names
from dovetail.kube.resources import JOB, JOBSET, WORKLOAD
from dovetail.manifest.types import RLHFJobSpec, Role
from dovetail.operator.render import gang
from dovetail.operator.render.context import Object, RenderContext, digest
from dovetail.operator.render.pod import comes_and_goes, coordinator_pod, group_pod
from dovetail.protocol.process.endings import BAD_CONFIGURATION, JOB_FAILED
from dovetail.protocol.process.process_names import CONTAINER, COORDINATOR


def _of_groups(spec: RLHFJobSpec) -> Any:
    return [[group.image, group.pod_template] for group in spec.groups]


def _of_coordinator(spec: RLHFJobSpec) -> Any:
    hub = spec.hub.model_dump(mode="json", include={"token_secret", "cache_claim"})
    return [spec.coordinator.model_dump(mode="json", exclude_defaults=True), hub]


# The manifest's settings of pods, which may change while the job is suspended, by the label with their hash. An entry
# must never change, because a JobSet that another version made has the hash of that version, and its pods would be made
# anew. A new field gets a label of its own. If a JobSet lacks a label, the version that made it did not know the field.
POD_PARTS: dict[str, Callable[[RLHFJobSpec], Any]] = {
    names.PODS_LABEL: _of_groups,
    names.COORDINATOR_PODS_LABEL: _of_coordinator,
    names.PREEMPTIBLE_PODS_LABEL: lambda spec: [group.preemptible for group in spec.groups],
}


def pods_labels(spec: RLHFJobSpec) -> dict[str, str]:
    """The hashes of POD_PARTS as labels."""
    return {name: digest(part(spec))[:16] for name, part in POD_PARTS.items()}


def pods_changed(labels: Mapping[str, str], spec: RLHFJobSpec) -> bool:
    """Whether the JobSet with these labels was made from other pod parts of the manifest."""
    return labels.get(names.CLASS_LABEL) != spec.job_class or any(
        labels.get(name, wanted) != wanted for name, wanted in pods_labels(spec).items()
    )


def class_labels(context: RenderContext) -> dict[str, str]:
    """The job's class as labels, with the hash of what it gives. Fields that a later release adds leave the hash as it
    is where they are not used."""
    if (given := context.job_class) is None:
        return {}
    gives = given.spec.model_dump(mode="json", by_alias=True, exclude={"allowed", "namespaces"}, exclude_defaults=True)
    return {names.CLASS_LABEL: given.name, names.CLASS_HASH_LABEL: digest(gives)[:16]}


def jobset(context: RenderContext) -> Object:
    """The JobSet succeeds when the coordinator does, and fails when a Job has failed for good. Programs wait for each
    other, so it sets no order of start."""
    final = (BAD_CONFIGURATION, JOB_FAILED)
    jobs = [(COORDINATOR, 1, job_spec(coordinator_pod(context), 1, hopeless=final))]
    for group in context.job.spec.groups:
        count = context.guaranteed(group)
        # Each rollout that comes and goes has its own Job, so that the operator can make one of them anew.
        copies = count if comes_and_goes(group) else 1
        jobs.append((group.name, copies, job_spec(group_pod(context, group), count // copies)))
    gang.join(context, [(name, copies * int(spec["completions"]), spec["template"]) for name, copies, spec in jobs])
    metadata = context.metadata(context.name, "jobset")
    metadata["labels"] |= context.queueing() | pods_labels(context.job.spec) | class_labels(context)
    gang.mark(context, metadata)
    if workload := names.sent_workload(context.job):
        metadata["annotations"] = {**metadata.get("annotations", {}), names.WORKLOAD_LABEL: workload}
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
                    "replicas": copies,
                    "template": {"metadata": {"labels": context.labels(name)}, "spec": spec},
                }
                for name, copies, spec in jobs
            ],
        },
    }


def claim_names(context: RenderContext) -> set[str]:
    """The PersistentVolumeClaims that the job's pods name. These are its own and its user's."""
    pods = (job["template"]["spec"]["template"]["spec"] for job in jobset(context)["spec"]["replicatedJobs"])
    claims = (volume.get("persistentVolumeClaim") for pod in pods for volume in pod.get("volumes") or ())
    return {str(claim["claimName"]) for claim in claims if claim}


def workload(context: RenderContext) -> Object:
    """The Workload says how many pods of each kind need room. It is made in the cluster of the queues, where the job
    does not run. Kueue copies it to the other clusters. There Kueue compares the copy with the JobSet that the operator
    makes, and the pods must be the same."""
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


# A Job counts failures over its whole life. Those of an hour are counted by the operator, which ends the job.
NO_LIMIT = 2**31 - 1


def job_spec(template: Object, pods: int, *, hopeless: tuple[int, ...] = (BAD_CONFIGURATION,)) -> Object:
    """The specification of a Job with `pods` pods. A pod that dies is replaced, except after an exit code of
    `hopeless`."""
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(hopeless)}
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": NO_LIMIT,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": codes},
            ]
        },
        "template": template,
    }


def surplus_jobs(context: RenderContext) -> list[Object]:
    """A Job for each surplus rollout that is wanted now. It has a lower priority, and may come and go while the job
    runs."""
    return [
        _job(context, group.name, index)
        for group in context.job.spec.groups
        if Role.TRAINER not in group.roles
        for index in range(context.guaranteed(group), context.wanted(group))
    ]


def _job(context: RenderContext, name: str, index: int) -> Object:
    group = next(g for g in context.job.spec.groups if g.name == name)
    template = group_pod(context, group, index)
    template["metadata"]["labels"][names.SURPLUS_LABEL] = "true"
    if priority := context.settings.surplus_priority_class:
        template["spec"]["priorityClassName"] = priority
    metadata = context.metadata(names.surplus_job(context.name, name, index), "surplus")
    metadata["labels"] |= {names.GROUP_LABEL: name, names.SURPLUS_LABEL: "true"} | context.queueing()
    # Kueue would use the job's priority for surplus rollouts, too, and other jobs could not preempt these first. Also,
    # a Workload that MultiKueue brought belongs to the JobSet.
    for label in (names.PRIORITY_LABEL, names.WORKLOAD_LABEL, names.ORIGIN_LABEL):
        metadata["labels"].pop(label, None)
    return {**JOB.type_meta, "metadata": metadata, "spec": job_spec(template, 1)}
