"""The Role of the job's pods."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import ROLE
from dovetail.manifest.describe.crd import GROUP, PLURAL
from dovetail.operator.render.context import Object, RenderContext


def role(context: RenderContext) -> Object:
    """Pods may read the job and its plan. Users' programs can use this; Dovetail itself does not."""
    plan = names.plan_config_map(context.name)
    return {
        **ROLE.type_meta,
        "metadata": context.metadata(names.account(context.name), "pods"),
        "rules": [
            {"apiGroups": [GROUP], "resources": [PLURAL], "resourceNames": [context.name], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [plan], "verbs": ["get"]},
        ],
    }
