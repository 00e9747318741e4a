"""Reads an inventory of GPUs, as pools of equal nodes, from a file or from a cluster's Node objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.gpus.gpu_products import GPU, GPU_RESOURCE, PRODUCT_LABEL, UnknownProduct, count, gpu
from dovetail.manifest.hashing import hashed_once

# The default of an inventory: each GPU has one 100 Gbit/s port (APP section VI-A has 100 GB/s for eight).
NETWORK_GBPS = 100.0
# The default time until a cloud replaces a node that it took, in seconds.
ABSENCE_SECONDS = 300.0
_KEYS = {"name", "product", "nodes", "gpusPerNode", "pricePerGPUHour", "networkGbps"}
_KEYS |= {"meanLifetimeHours", "meanAbsenceHours"}


class InventoryError(ValueError):
    """An inventory cannot be read. The message is one sentence that names the entry and the fix."""


@hashed_once
@dataclass(frozen=True)
class Pool:
    """`nodes` equal nodes of `per_node` GPUs each. GPU i of the pool is on node i // per_node.

    `network`: bytes per second of one GPU to other nodes, in one direction. `price`: the price of a GPU for an hour, in
    any currency. None: it is not known. `life`: the mean seconds from a spot node's start to its end. None: the nodes
    stay. `absence`: the mean seconds until the next node comes."""

    name: str
    gpu: GPU
    nodes: int
    per_node: int
    network: float = NETWORK_GBPS * 1e9 / 8
    price: float | None = None
    life: float | None = None
    absence: float = ABSENCE_SECONDS

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    @property
    def training(self) -> Pool:
        """The pool as trainers use its GPUs: see `GPU.training`."""
        mine = self.gpu.training
        return self if mine is self.gpu else replace(self, gpu=mine)

    def link(self, ranks: int) -> float:
        """The bytes per second between `ranks` neighbouring ranks. If they do not fit on a node, the network counts."""
        return self.gpu.peer if ranks <= self.per_node else self.network

    def ring(self, ranks: int, stride: int = 1) -> float:
        """The bytes per second of a collective over `ranks` ranks on every `stride`-th GPU. Between nodes, the GPUs of
        a node use their network cards together. Data enter a node once, and NVLink passes them on."""
        if ranks * stride <= self.per_node:
            return self.gpu.peer
        return min(self.gpu.peer, max(1, self.per_node // stride) * self.network)


@dataclass(frozen=True)
class Inventory:
    """Pools by name, in the order in which they were given. It is hashable and never empty."""

    pools: tuple[Pool, ...]

    def __post_init__(self) -> None:
        if not self.pools:
            raise InventoryError("the inventory has no pools; list at least one with product, nodes and gpusPerNode")
        names = [pool.name for pool in self.pools]
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise InventoryError(f"the inventory has two pools named {twice}; give each a name of its own")

    def __getitem__(self, name: str) -> Pool:
        """Raises KeyError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    @property
    def measured(self) -> bool:
        """Whether all figures of the GPUs were measured by `dovetail profile`. Otherwise some are from data sheets."""
        return all(pool.gpu.measured for pool in self.pools)


def read(document: Any, measured: Mapping[str, GPU] | None = None) -> Inventory:
    """Reads the parsed value of an inventory file, YAML or JSON: `{pools: [{name, product, nodes, gpusPerNode,
    pricePerGPUHour, meanLifetimeHours, meanAbsenceHours, networkGbps}]}`. It also reads the output of
    `kubectl get nodes -o json`. `networkGbps` is the Gbit/s of one GPU. `measured`: figures that replace those of the
    data sheets, by product. Raises InventoryError."""
    if isinstance(document, dict) and isinstance(document.get("items"), list):
        return from_nodes(document["items"], measured)
    if not isinstance(document, dict) or not isinstance(document.get("pools"), list):
        raise InventoryError("the inventory holds no list `pools`; see docs/planner.md for its format")
    return Inventory(tuple(_pool(entry, f"pools[{i}]", measured) for i, entry in enumerate(document["pools"])))


def _pool(entry: Any, where: str, measured: Mapping[str, GPU] | None) -> Pool:
    if not isinstance(entry, dict):
        raise InventoryError(f"{where} of the inventory is no mapping; give it product, nodes and gpusPerNode")
    if unknown := sorted(set(entry) - _KEYS):
        raise InventoryError(f"{where} of the inventory has an unknown {unknown[0]}; known are {', '.join(_KEYS)}")
    product = entry.get("product")
    if not isinstance(product, str):
        raise InventoryError(f"{where}.product of the inventory is {product!r}; give the GPU product's name")
    price, life = entry.get("pricePerGPUHour"), entry.get("meanLifetimeHours")
    absence = entry.get("meanAbsenceHours", ABSENCE_SECONDS / 3600)
    return Pool(
        name=str(entry.get("name") or slug(product)),
        gpu=_gpu(product, measured, f"{where}.product of the inventory"),
        nodes=_whole(entry, "nodes", where),
        per_node=_whole(entry, "gpusPerNode", where),
        network=_positive(entry.get("networkGbps", NETWORK_GBPS), f"{where}.networkGbps") * 1e9 / 8,
        price=None if price is None else _positive(price, f"{where}.pricePerGPUHour"),
        life=None if life is None else _positive(life, f"{where}.meanLifetimeHours") * 3600,
        absence=_positive(absence, f"{where}.meanAbsenceHours") * 3600,
    )


def from_nodes(nodes: Iterable[Mapping[str, Any]], measured: Mapping[str, GPU] | None = None) -> Inventory:
    """The inventory of Kubernetes Node objects, as `gpus.count` counts them. Each product and number of GPUs per node
    has one pool. Raises InventoryError."""
    counts = count(nodes)
    if not counts:
        raise InventoryError(
            f"no node is ready and has {GPU_RESOURCE} and the label {PRODUCT_LABEL}; install GPU feature discovery, or "
            "give an inventory file"
        )
    pools, names = [], [slug(product) for product, _ in counts]
    for (product, per_node), number in sorted(counts.items()):
        name = slug(product) if names.count(slug(product)) == 1 else f"{slug(product)}-x{per_node}"
        pools.append(Pool(name, _gpu(product, measured, f"a node's {PRODUCT_LABEL}"), number, per_node))
    return Inventory(tuple(pools))


def slug(product: str) -> str:
    """The name of a product's pool: NVIDIA-A100-SXM4-80GB becomes a100-sxm4-80gb."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^(nvidia|tesla)[- ]", "", product.lower())).strip("-")


def _gpu(product: str, measured: Mapping[str, GPU] | None, where: str) -> GPU:
    try:
        return gpu(product, measured)
    except UnknownProduct as error:
        raise InventoryError(f"{where}: {error}") from error


def _whole(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InventoryError(f"{where}.{key} of the inventory is {value!r}; it must be a whole number above 0")
    return value


def _positive(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InventoryError(f"{where} of the inventory is {value!r}; it must be a number above 0")
    return float(value)
