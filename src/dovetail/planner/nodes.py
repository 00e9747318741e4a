"""GPU nodes of a Kubernetes cluster, counted. It imports nothing, because the operator counts nodes, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_RESOURCE = "nvidia.com/gpu"

Pools = Mapping[tuple[str, int], int]
"""How many nodes there are by GPU product and GPUs a node."""


def count(nodes: Iterable[Mapping[str, Any]]) -> Pools:
    """Counts Kubernetes Node objects that are ready, not cordoned, and have GPUs by device plug-in and label."""
    found: dict[tuple[str, int], int] = {}
    for node in nodes:
        product = ((node.get("metadata") or {}).get("labels") or {}).get(PRODUCT_LABEL)
        status = node.get("status") or {}
        gpus = _allocatable(status)
        if product and gpus and not (node.get("spec") or {}).get("unschedulable") and _ready(status):
            found[product, gpus] = found.get((product, gpus), 0) + 1
    return found


def _allocatable(status: Mapping[str, Any]) -> int:
    value = str((status.get("allocatable") or {}).get(GPU_RESOURCE, "0"))
    return int(value) if value.isdigit() else 0


def _ready(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or []
    return all(c.get("status") == "True" for c in conditions if c.get("type") == "Ready")
