"""The RoleBinding of the job's pods and of the status API."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import ROLE_BINDING
from dovetail.operator.render.context import Object, RenderContext


def role_binding(context: RenderContext) -> Object:
    account, settings = names.account(context.name), context.settings
    subjects = [{"kind": "ServiceAccount", "name": account, "namespace": context.namespace}]
    if settings.api_account:
        subjects.append({"kind": "ServiceAccount", "name": settings.api_account, "namespace": settings.namespace})
    return {
        **ROLE_BINDING.type_meta,
        "metadata": context.metadata(account, "pods"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
        "subjects": subjects,
    }
