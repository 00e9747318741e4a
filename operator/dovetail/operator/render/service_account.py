"""The ServiceAccount of the job's pods."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import SERVICE_ACCOUNT
from dovetail.operator.render.context import Object, RenderContext


def service_account(context: RenderContext) -> Object:
    """The ServiceAccount. No pod mounts its token unless the manifest's podTemplate says so."""
    return {
        **SERVICE_ACCOUNT.type_meta,
        "metadata": context.metadata(names.account(context.name), "pods"),
        "automountServiceAccountToken": False,
    }
