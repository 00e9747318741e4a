"""The memory that a pod template gives the container of a group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.protocol.process_names import CONTAINER

_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:([eE][+-]?[0-9]+)|(m|[kMGTPE]|[KMGTPE]i)?)")
_SCALES = {"m": 1e-3, "k": 1e3} | {
    unit + suffix: base**power
    for suffix, base in (("", 1000.0), ("i", 1024.0))
    for power, unit in enumerate("KMGTPE", start=1)
    if unit + suffix != "K"
}


@dataclass(frozen=True)
class Limit:
    """`size`: bytes."""

    name: Literal["resources.limits.memory", "resources.requests.memory"]
    size: float


def memory_limit(template: Mapping[str, Any]) -> Limit | None:
    """The limit, or else the request, which may be all that a full node has; None where the template says neither, or
    what Kubernetes will refuse."""
    for container in _list(_get(_get(template, "spec"), "containers")):
        if _get(container, "name") != CONTAINER:
            continue
        resources = _get(container, "resources")
        limit = quantity(_get(_get(resources, "limits"), "memory"))
        if limit is not None:
            return Limit("resources.limits.memory", limit)
        request = quantity(_get(_get(resources, "requests"), "memory"))
        if request is not None:
            return Limit("resources.requests.memory", request)
    return None


def quantity(value: Any) -> float | None:
    """A Kubernetes resource quantity (`2Gi`, `500M`, `1e9`, a number); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    found = _QUANTITY.fullmatch(str(value).strip())
    if found is None:
        return None
    number, exponent, suffix = found.groups()
    return float(number + (exponent or "")) * _SCALES.get(suffix or "", 1.0)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
