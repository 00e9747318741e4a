"""The ServiceAccount of the job's pods."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.operator.render.context import Object, RenderContext


def service_account(context: RenderContext) -> Object:
    """No pod mounts its token unless the manifest's podTemplate says so."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": context.metadata(names.account(context.name), "pods"),
        "automountServiceAccountToken": False,
    }
