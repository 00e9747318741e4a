"""Reads the table of GPUs, and looks a GPU up in it. Counts the GPU nodes of a cluster, and checks that images have
kernels for the GPUs of a job's groups."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from dovetail.gpus.kernels import DEFAULT_ARCHITECTURES, capabilities, has_kernels, remedy, show
from dovetail.manifest.hashing import hashed_once
from dovetail.manifest.types import Dtype, RLHFJobSpec, Role

PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_RESOURCE = "nvidia.com/gpu"
GIB = 2**30
# A MIG slice by the "single" strategy of NVIDIA's device plug-in: the GPU, its sevenths, and its GB.
_MIG = re.compile(r"(.+)-MIG-(\d+)g\.(\d+)gb(?:\.[\w.+-]+)?")
# GPU feature discovery adds this suffix for time slicing.
_SUFFIX = re.compile(r"-SHARED$")


class HardwareError(ValueError):
    """A hardware file cannot be read. The message names the entry and the fix."""


class UnknownProduct(ValueError):
    """There is no such GPU product. The message offers the nearest names."""


@hashed_once
@dataclass(frozen=True)
class GPU:
    """`flops`: FLOPs per second by dtype, without sparsity. The hardware does not support a dtype that is missing.

    `memory`: bytes. `memory_bandwidth`, `nvlink`, `pcie`: bytes per second, the latter two in one direction. `nvlink`
    is 0 if the GPUs of a node have only PCIe. `measured`: `dovetail profile` measured the figures. `resource`: the
    resource that pods ask their node for. `node_product`: the product label of the nodes. If it is empty, it is
    `product`. `estimated`: the figures are those of a similar GPU."""

    product: str
    flops: Mapping[Dtype, float] = field(hash=False)
    memory: int
    memory_bandwidth: float
    nvlink: float
    pcie: float
    capability: tuple[int, int]
    source: str
    measured: bool = False
    resource: str = GPU_RESOURCE
    node_product: str = ""
    estimated: bool = False

    @property
    def bf16(self) -> bool:
        return Dtype.BFLOAT16 in self.flops

    @property
    def dtype(self) -> Dtype:
        """The dtype that `Auto` means on this GPU: bfloat16 if it has it, else float16, else float32."""
        return next(d for d in (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32) if d in self.flops)

    @property
    def training(self) -> GPU:
        """The GPU as trainers use it. They train in float32 if it has no bfloat16."""
        if self.bf16 or Dtype.FLOAT32 not in self.flops:
            return self
        return replace(self, flops={Dtype.FLOAT32: self.flops[Dtype.FLOAT32]})

    @property
    def peer(self) -> float:
        """The bytes per second to another GPU of the node."""
        return self.nvlink or self.pcie


def gpu(product: str, measured: Mapping[str, GPU] | None = None) -> GPU:
    """The GPU with this value of the node label. `measured`: figures that replace those of the data sheets, by product.

    Raises UnknownProduct."""
    name = _SUFFIX.sub("", product)
    table = {**products(), **(measured or {})}
    if name in table:
        return table[name]
    if (part := _MIG.fullmatch(name)) and part[1] in table:
        return _slice(table[part[1]], name, int(part[2]), int(part[3]))
    raise UnknownProduct(_unknown(product, list(table)))


def _slice(whole: GPU, name: str, seventh: int, gigabytes: int) -> GPU:
    """A MIG slice with `seventh` of a GPU's seven parts and memory of its own. NVLink does not join slices."""
    memory = min(whole.memory, int(gigabytes * 1e9))
    return replace(
        whole,
        product=name,
        flops={dtype: flops * seventh / 7 for dtype, flops in whole.flops.items()},
        memory=memory,
        memory_bandwidth=whole.memory_bandwidth * memory / whole.memory,
        nvlink=0.0,
        source=f"a part of {whole.product}",
    )


def is_known(product: str, more: Mapping[str, GPU]) -> bool:
    """Whether `gpu` finds the product in the table or in `more`."""
    try:
        gpu(product, more)
    except UnknownProduct:
        return False
    return True


def estimate(product: str, labels: Mapping[str, str] | None = None) -> GPU:
    """Estimates a product that is in no table. Memory and compute capability are those of its nodes' `labels` (GPU
    feature discovery). All else is that of the most similar known GPU. Without labels the memory is the one in the
    product's name, or 16 GiB."""
    said = labels or {}
    memory = int(said["nvidia.com/gpu.memory"]) << 20 if said.get("nvidia.com/gpu.memory", "").isdigit() else 0
    if not memory:
        named = re.search(r"(\d+)GB", product)
        memory = int(named[1]) * 10**9 if named else 16 * GIB
    parts = [said.get(f"nvidia.com/gpu.compute.{part}", "") for part in ("major", "minor")]
    capability = (int(parts[0]), int(parts[1])) if all(part.isdigit() for part in parts) else (8, 0)

    def distance(known: GPU) -> tuple[int, int, float]:
        major, minor = (abs(a - b) for a, b in zip(known.capability, capability, strict=True))
        return major, minor, abs(known.memory - memory)

    like = min(products().values(), key=distance)
    told = "the labels of its nodes" if said else "its name"
    source = f"estimated from {told} and {like.product}"
    found = replace(like, product=product, memory=memory, capability=capability, nvlink=0.0, source=source)
    return replace(found, estimated=True)


def _unknown(product: str, names: list[str]) -> str:
    key = _plain(product)
    by_key = {_plain(n): n for n in names}
    # Users write "H100" or "a100-80gb". Names with all those parts come first, then names with a similar spelling.
    parts = [p for p in re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", product.lower()) if p not in ("nvidia", "tesla")]
    near = [n for n in names if parts and all(p in _plain(n) for p in parts)]
    near += [by_key[k] for k in difflib.get_close_matches(key, by_key, 3, 0.5) if by_key[k] not in near]
    near += [n for n in names if parts and any(len(p) > 1 and p in _plain(n) for p in parts) and n not in near]
    offer = f"did you mean {' or '.join(near[:3])}?" if near else f"known are {', '.join(sorted(names))}"
    return f"GPU product {product} is unknown; {offer}"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def products() -> Mapping[str, GPU]:
    """The GPUs of the data sheets, by product."""
    return parse(resources.files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8"))


def parse(text: str, measured: bool = False) -> dict[str, GPU]:
    """Reads the text of a hardware file in the format of `gpus.toml`. Raises HardwareError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"the hardware file is not TOML: {error}") from error
    return read(tables, measured)


def read(tables: Mapping[str, Any], measured: bool = False) -> dict[str, GPU]:
    """Reads the tables of a hardware file, by product. Raises HardwareError."""
    return {str(name): _read(str(name), table, measured) for name, table in tables.items()}


def described(tables: Any) -> dict[str, GPU]:
    """Reads the GPUs that an administrator describes: objects by product, with the keys of `gpus.toml`. `source` may be
    missing. Raises HardwareError."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise HardwareError("the description of GPUs holds no tables by product")
    return read({name: {"source": "the administrator"} | table for name, table in tables.items()})


def _read(name: str, table: Any, measured: bool) -> GPU:
    if not isinstance(table, dict):
        raise HardwareError(f"{name} in the hardware file is no table; write [{name}] above its figures")
    known = {"source", "tflops", "memory_gib", "memory_gbps", "nvlink_gbps", "pcie_gbps", "capability"}
    if wrong := sorted((set(table) - {"resource", "node_product"}) ^ known):
        word = "misses" if wrong[0] in known else "has an unknown"
        raise HardwareError(f"[{name}] in the hardware file {word} {wrong[0]}; it needs {', '.join(sorted(known))}")
    numbers = {key: _number(name, key, table[key]) for key in known - {"source", "tflops", "capability"}}
    if not isinstance(table["tflops"], dict) or not table["tflops"]:
        raise HardwareError(f"[{name}] in the hardware file: tflops must be a table by dtype")
    capability = table["capability"]
    if not isinstance(capability, list) or len(capability) != 2 or not all(isinstance(c, int) for c in capability):
        raise HardwareError(f"[{name}] in the hardware file: capability must be two whole numbers, as [9, 0]")
    try:
        flops = {Dtype(d): 1e12 * _number(name, f"tflops.{d}", v) for d, v in table["tflops"].items()}
    except ValueError as error:
        raise HardwareError(f"[{name}] in the hardware file: tflops: {error}") from error
    return GPU(
        product=name,
        flops=flops,
        memory=int(numbers["memory_gib"] * GIB),
        memory_bandwidth=1e9 * numbers["memory_gbps"],
        nvlink=1e9 * numbers["nvlink_gbps"],
        pcie=1e9 * numbers["pcie_gbps"],
        capability=(capability[0], capability[1]),
        source=str(table["source"]),
        measured=measured,
        resource=str(table.get("resource", GPU_RESOURCE)),
        node_product=str(table.get("node_product", "")),
    )


def _number(name: str, key: str, value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and (value > 0 or key == "nvlink_gbps")
    if not good or value < 0:
        raise HardwareError(f"[{name}] in the hardware file: {key} is {value!r}; it must be a number above 0")
    return float(value)


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


# This replaces the list of architectures of an image that is not checked, because its kernels are not known.
ANY = "any"


def image_errors(
    spec: RLHFJobSpec,
    trainer: Collection[str] = DEFAULT_ARCHITECTURES,
    rollout: Collection[str] = DEFAULT_ARCHITECTURES,
    measured: Mapping[str, GPU] | None = None,
) -> list[str]:
    """One sentence for each group that names no image, if the operator's image has no kernels for the group's GPU.
    `trainer`, `rollout`: the architectures that the operator's images have kernels for, or ANY."""
    found = []
    for index, group in enumerate(spec.groups):
        built_for = rollout if Role.ROLLOUT in group.roles else trainer
        if group.on_cpu or group.image is not None or ANY in built_for:
            continue
        try:
            product = gpu(str(group.gpu.product), measured)
        except UnknownProduct:
            continue  # The plan says so.
        if not has_kernels(built_for, product.capability):
            found.append(
                f"spec.groups[{index}].image: {product.product} has compute capability {show(product.capability)}, and "
                f"the operator's image has kernels for {capabilities(built_for)}; {remedy(product.capability)}, and "
                "name it here."
            )
    return found
