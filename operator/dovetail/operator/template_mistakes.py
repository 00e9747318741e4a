"""Finds mistakes in the pod templates that an administrator gives, for all jobs (`jobs.podTemplate` of the chart) or in
an RLHFJobClass."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from kubernetes.aio.client import models

from dovetail.manifest.checks.rules.pod_rules import template_errors
from dovetail.manifest.merge import DIRECTIVE
from dovetail.protocol.process.process_names import CONTAINER

# Names with this similarity count as typing errors, such as nodeselector, toleration or image_pull_secrets.
ALIKE = 0.83
EVERYWHERE = {"files", "plan", "tmp"}  # volumes that every pod has
_LIST, _MAP = re.compile(r"List\[(.+)\]"), re.compile(r"Dict\[str, (.+)\]")
_SIMPLE: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("text; put it in quotes", (str,)),
    "int": ("a number", (int,)),
    "bool": ("true or false", (bool,)),
}
# Quantities may be numbers, as in {nvidia.com/gpu: 1}.
_QUANTITIES = {"limits", "requests", "overhead", "sizeLimit", "divisor"}


def first_mistake(template: dict[str, Any], owner: str) -> str | None:
    """A sentence with the first mistake. None if there is none. `owner` is the path of the object that has the
    podTemplate. A field that this release does not know may belong to a later Kubernetes. It is a mistake only if its
    name is nearly that of a known field."""
    where = f"{owner}.podTemplate"
    shape, rules = _mistakes(template, "V1PodTemplateSpec", where), iter(template_errors(template, owner))
    return next(shape, None) or next(rules, None) or next(_unnamed(template, where), None)


def _mistakes(value: Any, kind: str, path: str) -> Iterator[str]:
    """Yield a sentence for each value that does not have the form of its kind. The kind is a type of the Kubernetes
    API, as its Python client writes it."""
    if value is None or kind in ("object", "datetime", "bytes"):
        return
    if kind in _SIMPLE:
        words, types = _SIMPLE[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
            yield f"{path} is {_shown(value)}; it must be {words}."
    elif found := _LIST.fullmatch(kind):
        if not isinstance(value, list):
            yield f"{path} is {_shown(value)}; it must be a list."
            return
        for number, item in enumerate(value):
            yield from _mistakes(item, found[1], f"{path}[{number}]")
    elif found := _MAP.fullmatch(kind):
        if not isinstance(value, dict):
            yield f"{path} is {_shown(value)}; it must be an object."
            return
        number = path.rpartition(".")[2] in _QUANTITIES
        for key, item in value.items():
            if not (number and isinstance(item, int | float) and not isinstance(item, bool)):
                yield from _mistakes(item, found[1], f"{path}.{key}")
    elif not isinstance(value, dict):
        yield f"{path} is {_shown(value)}; it must be an object."
    else:
        yield from _of_object(value, kind, path)


def _of_object(value: dict[str, Any], kind: str, path: str) -> Iterator[str]:
    known = _fields(kind)
    for name, inner in value.items():
        if name in known:
            number = name in _QUANTITIES and isinstance(inner, int | float) and not isinstance(inner, bool)
            yield from () if number else _mistakes(inner, known[name], f"{path}.{name}")
        elif name != DIRECTIVE and (meant := _meant(str(name), kind)):
            yield f"{path}.{name} is no field of Kubernetes; did you mean {meant}?"


def _meant(name: str, kind: str) -> str | None:
    """The known field that the author probably meant. None if the field may be one that this release does not know."""
    plain = {field.lower(): field for field in _fields(kind)}
    for found in difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1, ALIKE):
        return plain[found]
    if kind == "V1PodSpec" and name in _fields("V1Container"):
        return f"containers: [{{name: {CONTAINER}, {name}: ...}}]"
    return None


@cache
def _fields(kind: str) -> dict[str, str]:
    """The types of an object's fields, by their names in YAML."""
    model = getattr(models, kind)
    return {model.attribute_map[name]: each for name, each in model.openapi_types.items()}


def _unnamed(template: dict[str, Any], where: str) -> Iterator[str]:
    """Sentences about containers without an image, and about mounts of volumes that are not there. Often a name is
    misspelt."""
    spec = template.get("spec") or {}
    for container in spec.get("containers") or ():
        if container.get("name") != CONTAINER and not (container.get("image") or DIRECTIVE in container):
            name = container["name"]
            yield f"{where}.spec.containers[{name}] has no image; the container of Dovetail is called {CONTAINER}."
    there = EVERYWHERE | {str(volume.get("name")) for volume in spec.get("volumes") or ()}
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        for mount in container.get("volumeMounts") or ():
            if (name := mount.get("name")) and name not in there:
                yield f"{where} mounts the volume {name}, which it does not have; add it to spec.volumes."


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return str(value).lower() if isinstance(value, bool) else repr(value)
