"""Applies `--set`, which changes fields of a manifest from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.manifest.documents import ManifestError, read_yaml
from dovetail.manifest.type_descriptions import named
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.errors import UsageError


def apply_overrides(document: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set fields in place, for example 'spec.ppo.iterations=3' and 'spec.groups[0].replicas=2'. Values are YAML. Raises
    UsageError."""
    for override in overrides:
        path, equals, text = override.partition("=")
        steps = _steps(path.strip())
        if not equals or not steps:
            raise UsageError(f"--set {override}: write it as field=value, for example spec.ppo.iterations=3")
        close = named(RLHFJob, str(steps[0]))
        if close and steps[0] not in close:
            # spec.ppo for ppo, and spec.ppo.iterations for iterations
            full = next((path for path in close if path == f"spec.{steps[0]}"), close[0]).replace("[]", "[0]")
            raise UsageError(f"--set {override}: did you mean {full}{path.strip()[len(str(steps[0])) :]}={text}?")
        try:
            value = read_yaml(f"value: {text}\n")["value"]
        except (ManifestError, TypeError, KeyError) as error:
            raise UsageError(f"--set {override}: the value is not valid YAML") from error
        _assign(document, steps, value, override)


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    for part in path.split("."):
        name, *indices = part.split("[")
        if not name:
            return []
        steps.append(name)
        for index in indices:
            if not index.endswith("]") or not index[:-1].isdigit():
                return []
            steps.append(int(index[:-1]))
    return steps


def _assign(document: dict[str, Any], steps: list[str | int], value: Any, override: str) -> None:
    here: Any = document
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1
        if isinstance(step, int):
            if not isinstance(here, list) or step >= len(here):
                raise UsageError(f"--set {override}: the manifest has no list entry [{step}] there")
        elif not isinstance(here, dict):
            raise UsageError(f"--set {override}: {step} is not below a mapping in the manifest")
        if last:
            here[step] = value
        elif isinstance(step, int):
            here = here[step]
        else:
            if here.get(step) is None:
                here[step] = {}
            here = here[step]
