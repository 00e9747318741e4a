"""What the watches have told: the newest known version of every RLHFJob and of its children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.types import KIND
from dovetail.operator import names
from dovetail.operator.children import Children, Object, Ref, label

Key = tuple[str, str]  # namespace and name of an RLHFJob
_POD_SPEC = ("nodeName",)


class Store:
    """Filled by watch events and by replies to our own writes; an older version never replaces a newer one."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Object] = {}
        self._children: dict[Key, dict[Ref, Object]] = {}

    def put(self, thing: Object) -> Key | None:
        """Returns the job that it belongs to, None for something that is no child of any."""
        key = key_of(thing)
        if key is None:
            return None
        slot, place = self._slot(thing, key)
        there = slot.get(place)
        if there is None or _version(there) <= _version(thing):
            slot[place] = trim(thing)
        return key

    def remove(self, thing: Object) -> Key | None:
        """It is gone, unless a newer one of the same name is known."""
        key = key_of(thing)
        if key is None:
            return None
        slot, place = self._slot(thing, key)
        there = slot.get(place)
        if there is not None and there["metadata"].get("uid") == thing["metadata"].get("uid"):
            del slot[place]
        if not self._children.get(key):
            self._children.pop(key, None)
        return key

    def job(self, key: Key) -> Object | None:
        return self._jobs.get(key)

    def jobs(self) -> list[Key]:
        return sorted(self._jobs)

    def children(self, key: Key) -> Children:
        return Children(dict(self._children.get(key, {})))

    def of_kind(self, kind: str, namespace: str | None) -> list[Object]:
        """Everything of a kind, for comparison with a list."""
        jobs = self._jobs.values() if kind == KIND else ()
        found = [*jobs, *(t for slot in self._children.values() for (k, _), t in slot.items() if k == kind)]
        return [t for t in found if namespace in (None, t["metadata"]["namespace"])]

    def _slot(self, thing: Object, key: Key) -> tuple[dict[Any, Object], Any]:
        if thing["kind"] == KIND:
            return self._jobs, key
        return self._children.setdefault(key, {}), (thing["kind"], thing["metadata"]["name"])


def key_of(thing: Object) -> Key | None:
    metadata = thing["metadata"]
    name = metadata["name"] if thing["kind"] == KIND else label(thing, names.JOB_LABEL)
    return (metadata["namespace"], name) if name else None


def trim(thing: Object) -> Object:
    """Without what is never looked at, which is most of a pod."""
    metadata = {key: value for key, value in thing["metadata"].items() if key != "managedFields"}
    kept: dict[str, Any] = {**thing, "metadata": metadata}
    if thing["kind"] == "Pod":
        kept["spec"] = {key: thing["spec"][key] for key in _POD_SPEC if key in thing.get("spec", {})}
    elif thing["kind"] == "Job":
        kept["spec"] = {}
    return kept


def _version(thing: Mapping[str, Any]) -> int:
    """Resource versions are numbers that grow: https://kubernetes.io/docs/reference/using-api/api-concepts."""
    text = str(thing["metadata"].get("resourceVersion", "0"))
    return int(text) if text.isdigit() else 0
