"""What a pod template of a manifest may not change, because the pod would not work with it. Pure.

Names and paths are those that the operator renders; tests/unit/test_pod_templates.py compares them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from dovetail.manifest.merge import DIRECTIVE, MergeError, merge

CONTAINER = "dovetail"
# Volumes that no template may replace. `tmp` and `shm` may get another size or medium.
VOLUMES = ("files", "plan", "reward-code", "hub-cache")
CLAIM_VOLUME = "claim-"
MOUNTS = ("/var/dovetail", "/etc/dovetail", "/var/dovetail-claims", "/var/dovetail-hub", "/etc/dovetail-code")
SCRATCH_MOUNTS = {"/tmp": "tmp", "/dev/shm": "shm"}
# What a pod is told about itself and its job.
VARIABLES = tuple(
    f"DOVETAIL_{name}"
    for name in ("JOB", "NAME", "RUN_DIR", "COORDINATOR", "TOKEN", "HOST", "PORT", "GROUP", "INDEX", "CONFIG_DIR")
)
LABELS = "dovetail.dev/"


def template_problem(template: dict[str, Any]) -> str:
    """Why a template cannot be applied or would break its pod, without a full stop; empty if nothing is wrong."""
    try:
        merge({}, template)
    except MergeError as error:
        return str(error)
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
    if "restartPolicy" in spec and spec["restartPolicy"] != "Never":
        yield f"{where}.restartPolicy must be Never, because the pod's Job replaces it; remove the field"
    volumes = spec.get("volumes", [])
    yield from _whole(spec, "volumes", where)
    for volume in _items(volumes):
        name = str(volume.get("name"))
        own = name in VOLUMES or (name.startswith(CLAIM_VOLUME) and name[len(CLAIM_VOLUME) :].isdigit())
        if own or (volume.get(DIRECTIVE) == "delete" and name in SCRATCH_MOUNTS.values()):
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
    for variable in _items(container.get("env", [])):
        if variable.get("name") in VARIABLES:
            yield f"{where}.env has {variable['name']}, which Dovetail sets; remove it"
    for mount in _items(container.get("volumeMounts", [])):
        path = PurePosixPath(str(mount.get("mountPath")))
        for own in MOUNTS:
            if path.is_relative_to(own) or PurePosixPath(own).is_relative_to(path):
                yield f"{where}.volumeMounts has {path}, where Dovetail mounts {own}; choose another path"
        volume = SCRATCH_MOUNTS.get(str(path))
        if volume is not None and (mount.get(DIRECTIVE) or mount.get("name", volume) != volume):
            yield f"{where}.volumeMounts has {path}, where Dovetail mounts {volume}; change the volume {volume} instead"


def _whole(parent: dict[str, Any], name: str, where: str) -> Iterator[str]:
    """Whether a list that has parts of ours is removed or replaced."""
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
