"""The Secret with the job's token."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import SECRET
from dovetail.operator.render.context import Object, RenderContext


def secret(context: RenderContext, token: str) -> Object:
    """The Secret is created once and never changes, because running pods hold the token."""
    return {
        **SECRET.type_meta,
        "metadata": context.metadata(names.token_secret(context.name), "token"),
        "type": "Opaque",
        "immutable": True,
        "stringData": {names.TOKEN_KEY: token},
    }
