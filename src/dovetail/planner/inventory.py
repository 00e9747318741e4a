"""The GPUs that there are: pools of equal nodes, from a file or from a cluster's Node objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.planner.hardware import GPU, UnknownProduct, gpu
from dovetail.planner.hashing import hashed_once
from dovetail.planner.nodes import GPU_RESOURCE, PRODUCT_LABEL, count

# Assumed where an inventory does not say: one 100 Gbit/s port a GPU (APP section VI-A has 100 GB/s for eight).
NETWORK_GBPS = 100.0
# Until a cloud gives another node for one that it took, seconds.
ABSENCE_SECONDS = 300.0
_KEYS = {"name", "product", "nodes", "gpusPerNode", "pricePerGPUHour", "networkGbps"}
_KEYS |= {"meanLifetimeHours", "meanAbsenceHours"}


class InventoryError(ValueError):
    """An inventory that cannot be read; one sentence that names the entry and the fix."""


@hashed_once
@dataclass(frozen=True)
class Pool:
    """`nodes` equal nodes of `per_node` GPUs. `network`: bytes per second of one GPU to other nodes, one direction.

    GPU i of the pool is on node i // per_node. `price`: of a GPU for an hour, in any currency; None: not known.
    `life`: mean seconds from a node's start to its end, if the nodes come and go (spot); None: they stay. `absence`:
    mean seconds until the next one."""

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
        """As trainers use its GPUs."""
        mine = self.gpu.training
        return self if mine is self.gpu else replace(self, gpu=mine)

    def link(self, ranks: int) -> float:
        """Bytes per second between `ranks` neighbouring ranks: within a node, or else over the network."""
        return self.gpu.peer if ranks <= self.per_node else self.network

    def ring(self, ranks: int, stride: int = 1) -> float:
        """Bytes per second of a collective over `ranks` ranks, every `stride`-th GPU. Between nodes, the GPUs of a node
        add up their network cards: data cross once a node, and NVLink passes them on."""
        if ranks * stride <= self.per_node:
            return self.gpu.peer
        return min(self.gpu.peer, max(1, self.per_node // stride) * self.network)


@dataclass(frozen=True)
class Inventory:
    """Pools by name, in the order in which they were given. Hashable; never empty."""

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
        """Whether all GPU figures were measured (`dovetail profile`), none from data sheets."""
        return all(pool.gpu.measured for pool in self.pools)


def read(document: Any, measured: Mapping[str, GPU] | None = None) -> Inventory:
    """The value of an inventory file, YAML or JSON: `{pools: [{name, product, nodes, gpusPerNode, pricePerGPUHour,
    meanLifetimeHours, meanAbsenceHours, networkGbps}]}`, or of what `kubectl get nodes -o json` prints. `networkGbps`:
    Gbit/s of one GPU. Raises InventoryError."""
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
        nodes=_whole(entry, "nodes", 1, where),
        per_node=_whole(entry, "gpusPerNode", 1, where),
        network=_positive(entry.get("networkGbps", NETWORK_GBPS), f"{where}.networkGbps") * 1e9 / 8,
        price=None if price is None else _positive(price, f"{where}.pricePerGPUHour"),
        life=None if life is None else _positive(life, f"{where}.meanLifetimeHours") * 3600,
        absence=_positive(absence, f"{where}.meanAbsenceHours") * 3600,
    )


def from_nodes(nodes: Iterable[Mapping[str, Any]], measured: Mapping[str, GPU] | None = None) -> Inventory:
    """Of Kubernetes Node objects, as `dovetail.planner.nodes` counts them: one pool for each product and number of GPUs
    a node. Raises InventoryError."""
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
    """A pool's name by its product: NVIDIA-A100-SXM4-80GB is a100-sxm4-80gb."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^(nvidia|tesla)[- ]", "", product.lower())).strip("-")


def _gpu(product: str, measured: Mapping[str, GPU] | None, where: str) -> GPU:
    try:
        return gpu(product, measured)
    except UnknownProduct as error:
        raise InventoryError(f"{where}: {error}") from error


def _whole(entry: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InventoryError(f"{where}.{key} of the inventory is {value!r}; it must be a whole number above 0")
    return value


def _positive(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InventoryError(f"{where} of the inventory is {value!r}; it must be a number above 0")
    return float(value)
