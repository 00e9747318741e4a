"""The part of a podTemplate's schema that the API server must know. It has the lists whose items have names, and the
fields that the rules read. All other fields are open."""

from __future__ import annotations

from typing import Any

from dovetail.manifest.merge import DIRECTIVE

Schema = dict[str, Any]


def _text(description: str, most: int = 253) -> Schema:
    return {"type": "string", "maxLength": most, "description": description}


def _open(description: str, **properties: Schema) -> Schema:
    opened = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}
    return opened | {"description": description}


def _list(description: str, most: int, key: str, **properties: Schema) -> Schema:
    """A list whose items are identified by `key`. An item may also be a directive."""
    items = _open(f"An item, with its {key}.", **properties)
    items["anyOf"] = [{"required": [key]}, {"required": [DIRECTIVE]}]
    return {"type": "array", "maxItems": most, "description": description, "items": items}


def pod_template() -> Schema:
    """The `metadata` and `spec` of a strategic merge patch of a pod template, without the description."""
    env = _list("Environment variables.", 256, "name", name=_text("The variable's name."))
    mounts = _list(
        "Where volumes are mounted.",
        64,
        "mountPath",
        mountPath=_text("Path in the container.", 1024),
        name=_text("The volume's name."),
    )
    name = _text("The container's name.")
    spec = _open(
        "The pod's specification.",
        containers=_list("Containers; Dovetail's is `dovetail`.", 16, "name", name=name, env=env, volumeMounts=mounts),
        initContainers=_list("Containers that run before.", 16, "name", name=name, env=env),
        volumes=_list("Volumes.", 64, "name", name=_text("The volume's name.")),
        # null removes the operator's value
        imagePullSecrets=_list("Secrets for registries.", 16, "name", name=_text("The Secret's name."))
        | {"nullable": True},
        restartPolicy=_text("Never, or not given.", 32),
    )
    opened = _open("", spec=spec)
    del opened["description"]
    return opened
