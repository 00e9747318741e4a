"""The specification of a batch/v1 Job, for groups in the JobSet and for surplus rollouts. A surplus rollout is one
beyond a group's minimum. It has a Job of lower priority that may come and go while the job runs."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import JOB
from dovetail.manifest.types import Role
from dovetail.operator.render.context import Object, RenderContext
from dovetail.operator.render.pod import group_pod
from dovetail.protocol.process.exit_codes import BAD_CONFIGURATION
from dovetail.protocol.process.process_names import CONTAINER

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
    """A Job for each surplus rollout that is wanted now."""
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
