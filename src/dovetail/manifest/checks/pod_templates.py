"""Says what a pod template in a manifest may not change, because the pod would not work with it. The names and paths
are those that the operator renders. tests/unit/manifest/test_pod_templates.py compares them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.manifest.fixed_names import CONTAINER
from dovetail.manifest.merge import DIRECTIVE, MergeError, merge

# Volumes that no template may replace. `tmp` and `shm` may get another size or medium.
VOLUMES = ("files", "plan", "reward-code", "hub-cache", "output")
MOUNTS = (
    "/var/dovetail",
    "/etc/dovetail",
    "/var/dovetail-claims",
    "/var/dovetail-hub",
    "/etc/dovetail-code",
    "/var/dovetail-output",
)
# The folders that contain these.
PARENTS = ("/", "/etc", "/etc/", "/var", "/var/")
SCRATCH_MOUNTS = {"/tmp": "tmp", "/dev/shm": "shm"}
# The variables that tell a pod about itself and its job.
VARIABLES = tuple(
    f"DOVETAIL_{name}"
    for name in ("JOB", "NAME", "RUN_DIR", "COORDINATOR", "TOKEN", "HOST", "PORT", "GROUP", "INDEX", "CONFIG_DIR")
)
LABELS = "dovetail.dev/"
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:([eE][+-]?[0-9]+)|(m|[kMGTPE]|[KMGTPE]i)?)")
_SCALES = {"m": 1e-3, "k": 1e3} | {
    unit + suffix: base**power
    for suffix, base in (("", 1000.0), ("i", 1024.0))
    for power, unit in enumerate("KMGTPE", start=1)
    if unit + suffix != "K"
}


def merge_problem(template: dict[str, Any]) -> str:
    """The reason why a template cannot be applied, without a full stop. Empty if it can be."""
    try:
        merge({}, template)
    except MergeError as error:
        return str(error)
    return ""


def template_problem(template: dict[str, Any]) -> str:
    """Other settings that would break the pod, without a full stop. Empty if there are none."""
    return next(_problems(template), "")


def _problems(template: dict[str, Any]) -> Iterator[str]:
    if DIRECTIVE in template:
        yield f"podTemplate.{DIRECTIVE} would remove Dovetail's own parts; remove it"
    for name in template:
        if name not in ("metadata", "spec", DIRECTIVE):
            yield f"podTemplate.{name} is no part of a pod template, which has metadata and spec; move it below one"
    labels = _object(_object(template.get("metadata")).get("labels"))
    for label in labels:
        if label.startswith(LABELS):
            yield f"podTemplate.metadata.labels has {label}, by which Dovetail finds its pods; remove it"
    yield from _spec_problems(template.get("spec", {}))


def _spec_problems(spec: Any) -> Iterator[str]:
    where = "podTemplate.spec"
    if not isinstance(spec, dict) or DIRECTIVE in spec:
        yield f"{where} would remove Dovetail's own parts; give an object with the fields to change"
        return
    volumes = spec.get("volumes", [])
    yield from _whole(spec, "volumes", where)
    for volume in _items(volumes):
        name = str(volume.get("name"))
        if volume.get(DIRECTIVE) == "delete" and name in SCRATCH_MOUNTS.values():
            yield f"{where}.volumes has {name}, which is a volume of Dovetail; choose another name"
    yield from _whole(spec, "containers", where)
    for container in _items(spec.get("containers", [])):
        if container.get("name") == CONTAINER:
            yield from _container_problems(container, f"{where}.containers[{CONTAINER}]")
    for container in _items(spec.get("initContainers", [])):
        if container.get("name") == CONTAINER:
            yield f"{where}.initContainers has {CONTAINER}, the name of the pod's own container; choose another"


def _container_problems(container: dict[str, Any], where: str) -> Iterator[str]:
    if DIRECTIVE in container:
        yield f"{where} would remove the container in which Dovetail runs; remove {DIRECTIVE}"
        return
    for name in ("env", "volumeMounts"):
        yield from _whole(container, name, where)
    for mount in _items(container.get("volumeMounts", [])):
        path = str(mount.get("mountPath"))
        volume = SCRATCH_MOUNTS.get(path)
        if volume is not None and (mount.get(DIRECTIVE) or mount.get("name", volume) != volume):
            yield f"{where}.volumeMounts has {path}, where Dovetail mounts {volume}; change the volume {volume} instead"


def _whole(parent: dict[str, Any], name: str, where: str) -> Iterator[str]:
    """Whether the template removes or replaces a list that has Dovetail's own parts."""
    value = parent.get(name, [])
    if not isinstance(value, list):
        yield f"{where}.{name} would remove Dovetail's own; give a list of what to add or change"
    elif {DIRECTIVE: "replace"} in value:
        yield f"{where}.{name} would remove Dovetail's own; remove {DIRECTIVE}: replace"


def _items(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------ memory


@dataclass(frozen=True)
class Limit:
    """The memory that a pod template allows. `name` is the field, and `size` is in bytes."""

    name: Literal["resources.limits.memory", "resources.requests.memory"]
    size: float


def memory_limit(template: Mapping[str, Any]) -> Limit | None:
    """The memory limit of a pod template. Without a limit it is the request, because a full node may have no more. None
    if the template has neither, or a value that Kubernetes will refuse."""
    for container in _items(_object(template.get("spec")).get("containers")):
        if container.get("name") == CONTAINER:
            resources = _object(container.get("resources"))
            if (size := quantity(_object(resources.get("limits")).get("memory"))) is not None:
                return Limit("resources.limits.memory", size)
            if (size := quantity(_object(resources.get("requests")).get("memory"))) is not None:
                return Limit("resources.requests.memory", size)
    return None


def quantity(value: Any) -> float | None:
    """The value of a Kubernetes resource quantity (`2Gi`, `500M`, `1e9` or a number). None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    found = _QUANTITY.fullmatch(str(value).strip())
    if found is None:
        return None
    number, exponent, suffix = found.groups()
    return float(number + (exponent or "")) * _SCALES.get(suffix or "", 1.0)
