"""The PodDisruptionBudget. With it, drains take the job's pods one at a time."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import DISRUPTION_BUDGET
from dovetail.operator.render.context import Object, RenderContext


def disruption_budget(context: RenderContext) -> Object:
    """The budget gives the number of pods that must stay, because `maxUnavailable` cannot be counted for Jobs. Surplus
    rollouts may always be evicted, and a pod that is not ready never delays a drain."""
    pods = 1 + sum(context.guaranteed(group) for group in context.job.spec.groups)
    return {
        **DISRUPTION_BUDGET.type_meta,
        "metadata": context.metadata(context.name, "disruption"),
        "spec": {
            "minAvailable": pods - 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {names.JOB_LABEL: context.name},
                "matchExpressions": [{"key": names.SURPLUS_LABEL, "operator": "DoesNotExist"}],
            },
        },
    }
