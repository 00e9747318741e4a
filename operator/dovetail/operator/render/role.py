"""The Role of a job. It says what its pods and the status API may read of the job. Nobody else may read it."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import ROLE
from dovetail.manifest.describe.crd import GROUP, PLURAL
from dovetail.operator.render.context import Object, RenderContext


def role(context: RenderContext) -> Object:
    """The Role allows reading the job, its plan and its history, and the token with which the status API asks the
    coordinator. Pods have the token anyway. Users' programs in pods can read the rest; Dovetail's own programs do
    not."""
    texts = [names.plan_config_map(context.name), names.history_config_map(context.name)]
    token = [names.token_secret(context.name)]
    return {
        **ROLE.type_meta,
        "metadata": context.metadata(names.account(context.name), "pods"),
        "rules": [
            {"apiGroups": [GROUP], "resources": [PLURAL], "resourceNames": [context.name], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": texts, "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": token, "verbs": ["get"]},
        ],
    }
