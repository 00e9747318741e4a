"""Makes pods start together or not at all, on clusters that do not use Kueue. The scheduler is the one that the
administrator names (`OperatorSettings.gang`). Surplus rollouts are in no gang, because they come and go one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dovetail.kube.resources import POD_GROUPS, Gang
from dovetail.operator.render.context import Object, RenderContext, digest

# The schedulers by the names that their own installations give them. That of Kubernetes is the default scheduler.
SCHEDULERS: dict[str, str] = {
    Gang.VOLCANO: "volcano",
    Gang.COSCHEDULING: "scheduler-plugins-scheduler",
    Gang.YUNIKORN: "yunikorn",
    Gang.KAI: "kai-scheduler",
}
KAI = "kai.scheduler/"
KAI_MEMBERS = f"{KAI}batch-min-member"


def pod_group(context: RenderContext) -> Object | None:
    """The PodGroup of coordinator, trainers and minimum rollouts. None if the scheduler needs none. Its content may not
    change, so its name has a hash of the content. A job that starts again with other sizes gets another PodGroup."""
    if (resource := POD_GROUPS.get(_gang(context))) is None:
        return None
    return {**resource.type_meta, "metadata": context.metadata(_name(context), "gang"), "spec": _spec(context)}


def mark(context: RenderContext, metadata: Object) -> None:
    """Write on the JobSet what its scheduler reads there. KAI makes the PodGroup itself, from the JobSet. Its later
    versions start all parts of a JobSet together, so they do not need the number. Earlier versions need it."""
    if _gang(context) == Gang.KAI:
        metadata["labels"] |= _kai(context)
        _annotate(metadata, {KAI_MEMBERS: str(_members(context))})


def join(context: RenderContext, templates: Sequence[tuple[str, int, Object]]) -> None:
    """Make pods members of the gang. `templates` has name, number of pods and pod template of each part of the
    JobSet."""
    gang = _gang(context)
    if not gang:
        return
    tasks = [_task(*template) for template in templates]
    for name, _, template in templates:
        metadata, spec = template["metadata"], template["spec"]
        if gang in SCHEDULERS:
            spec.setdefault("schedulerName", SCHEDULERS[gang])
        if gang == Gang.KUBERNETES:
            spec["schedulingGroup"] = {"podGroupName": _name(context)}
        elif gang == Gang.VOLCANO:
            _annotate(metadata, {"scheduling.k8s.io/group-name": _name(context)})
        elif gang == Gang.COSCHEDULING:
            metadata["labels"]["scheduling.x-k8s.io/pod-group"] = _name(context)
        elif gang == Gang.KAI:
            metadata["labels"] |= _kai(context)
        else:
            metadata["labels"]["applicationId"] = f"{context.namespace}-{context.name}-{context.uid[:8]}"
            wait = f" placeholderTimeoutInSeconds={limit}" if (limit := _limit(context)) else ""
            _annotate(
                metadata,
                {
                    "yunikorn.apache.org/task-group-name": name,
                    "yunikorn.apache.org/task-groups": json.dumps(tasks),
                    "yunikorn.apache.org/schedulingPolicyParameters": f"gangSchedulingStyle=Hard{wait}",
                },
            )


def _gang(context: RenderContext) -> str:
    """Whether Kueue admits the job. It admits all or nothing by itself."""
    return "" if context.queueing() else context.settings.gang


def _limit(context: RenderContext) -> int | None:
    """The seconds after which a gang that is partly placed gives its GPUs back, if the scheduler supports that. The
    operator ends the job then in any case."""
    return context.start_timeout


def _spec(context: RenderContext) -> Object:
    members = _members(context)
    if _gang(context) == Gang.KUBERNETES:
        return {"schedulingPolicy": {"gang": {"minCount": members}}}
    spec: Object = {"minMember": members}
    if _gang(context) == Gang.COSCHEDULING and (limit := _limit(context)):
        spec["scheduleTimeoutSeconds"] = limit
    return spec


def _members(context: RenderContext) -> int:
    return 1 + sum(context.guaranteed(group) for group in context.job.spec.groups)


def _kai(context: RenderContext) -> dict[str, str]:
    """The RLHFJob's labels for KAI, such as the queue's."""
    return {key: value for key, value in context.job.metadata.labels.items() if key.startswith(KAI)}


def _name(context: RenderContext) -> str:
    return f"{context.name}-{digest(_spec(context))[:8]}"


def _annotate(metadata: Object, annotations: dict[str, str]) -> None:
    metadata["annotations"] = {**metadata.get("annotations", {}), **annotations}


def _task(name: str, count: int, template: Object) -> Object:
    """A task group of YuniKorn, which reserves the resources that the pods request."""
    spec: dict[str, Any] = template["spec"]
    found: Object = {"name": name, "minMember": count, "minResource": _requests(spec["containers"])}
    return found | {key: spec[key] for key in ("nodeSelector", "tolerations", "affinity") if spec.get(key)}


def _requests(containers: Sequence[Object]) -> dict[str, str]:
    """The resources that a pod's main container requests. It is the first container. Those that a podTemplate adds are
    small."""
    resources = containers[0].get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
