"""The RoleBinding of the job's pods."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import ROLE_BINDING
from dovetail.operator.render.context import Object, RenderContext


def role_binding(context: RenderContext) -> Object:
    account = names.account(context.name)
    return {
        **ROLE_BINDING.type_meta,
        "metadata": context.metadata(account, "pods"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": context.namespace}],
    }
