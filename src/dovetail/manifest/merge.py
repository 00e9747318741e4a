"""Applies strategic merge patches to pod templates. It has the subset of Kubernetes' rules that pod templates use."""

from __future__ import annotations

from typing import Any

# The merge keys by the list's name, from the patchMergeKey tags of k8s.io/api/core/v1. Other lists are replaced as a
# whole.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
DIRECTIVE = "$patch"


class MergeError(ValueError):
    """The patch cannot be applied. The message is one sentence."""


def merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """`base` with `patch` merged in. Neither of them is changed. null removes a field. `$patch: delete` removes an item
    of a list. `$patch: replace` replaces the whole object by the patch's object. Raises MergeError."""
    return _objects(base, patch, "podTemplate")


def _objects(base: dict[str, Any], patch: dict[str, Any], path: str) -> dict[str, Any]:
    if patch.get(DIRECTIVE) == "replace":
        return {key: value for key, value in patch.items() if key != DIRECTIVE}
    result = dict(base)
    for key, value in patch.items():
        if key == DIRECTIVE:
            raise MergeError(f"{path}.{DIRECTIVE} is {value!r}; in an object only replace is understood")
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _value(result.get(key), value, key, f"{path}.{key}")
    return result


def _value(base: Any, patch: Any, name: str, path: str) -> Any:
    if isinstance(patch, dict):
        return _objects(base if isinstance(base, dict) else {}, patch, path)
    if isinstance(patch, list) and name in MERGE_KEYS:
        return _lists(base if isinstance(base, list) else [], patch, MERGE_KEYS[name], path)
    return patch


def _lists(base: list[Any], patch: list[Any], key: str, path: str) -> list[Any]:
    """Items with the same key are merged in place. Other items are added at the end, in the patch's order."""
    result: dict[Any, Any] = {item.get(key, DIRECTIVE): item for item in base}
    for number, item in enumerate(patch):
        place = f"{path}[{number}]"
        if not isinstance(item, dict):
            raise MergeError(f"{place} must be an object with {key}")
        if item == {DIRECTIVE: "replace"}:
            result = {}
            continue
        if not isinstance(item.get(key), str | int):
            raise MergeError(f"{place} lacks {key}, by which items of this list are told apart")
        if item.get(DIRECTIVE) == "delete":
            result.pop(item[key], None)
        else:
            result[item[key]] = _objects(result.get(item[key], {}), item, place)
    return list(result.values())
