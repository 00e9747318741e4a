"""The part of a podTemplate's schema that the API server must know: lists whose items have names, and what the rules
look at. All else is open."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_NAME: Schema = {"type": "string", "maxLength": 253}
_PATH: Schema = {"type": "string", "maxLength": 1024}
DIRECTIVE = "$patch"


def _open(**properties: Schema) -> Schema:
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}


def _list(most: int, key: str, **properties: Schema) -> Schema:
    """A list whose items are told apart by `key`. An item may be a directive instead."""
    items = _open(**properties) | {"anyOf": [{"required": [key]}, {"required": [DIRECTIVE]}]}
    return {"type": "array", "maxItems": most, "items": items}


def pod_template() -> Schema:
    """`metadata` and `spec` of a strategic merge patch of a pod template."""
    containers = _list(
        16,
        "name",
        name=_NAME,
        env=_list(256, "name", name=_NAME),
        volumeMounts=_list(64, "mountPath", mountPath=_PATH, name=_NAME),
    )
    spec = _open(
        containers=containers,
        initContainers=_list(16, "name", name=_NAME, env=_list(256, "name", name=_NAME)),
        volumes=_list(64, "name", name=_NAME),
        # null removes the operator's.
        imagePullSecrets=_list(16, "name", name=_NAME) | {"nullable": True},
        restartPolicy={"type": "string", "maxLength": 32},
    )
    return _open(spec=spec)
