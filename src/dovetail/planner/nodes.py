"""Counts the GPU nodes of a Kubernetes cluster. It imports nothing of Dovetail, because the operator uses it too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_RESOURCE = "nvidia.com/gpu"

Pools = Mapping[tuple[str, int], int]
"""The number of nodes by (GPU product, GPUs per node)."""


def count(nodes: Iterable[Mapping[str, Any]]) -> Pools:
    """Counts the Kubernetes Node objects that are ready and not cordoned, and whose GPUs are known.

    The number of GPUs comes from the device plug-in, the product from the label PRODUCT_LABEL."""
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
