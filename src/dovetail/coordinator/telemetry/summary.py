"""Builds summary.json, the results of a run. All functions are pure except the atomic writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.protocol.files.durable import sync


def mean_ci95(values: Sequence[float]) -> dict[str, float]:
    """The mean, and the half-width of its 95% confidence interval. That is 1.96 s / sqrt(n) with the unbiased standard
    deviation s, and 0 for n < 2."""
    n = len(values)
    if n == 0:
        raise ValueError("no values")
    mean = math.fsum(values) / n
    if n < 2:
        return {"mean": mean, "ci95": 0.0}
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return {"mean": mean, "ci95": 1.96 * math.sqrt(variance / n)}


def set_path(document: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in nested dictionaries: set_path(d, "ppo.reward_first", x). Missing dictionaries are created."""
    *parents, last = path.split(".")
    for name in parents:
        document = document.setdefault(name, {})
    document[last] = value


def build(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Nest facts with dotted names: {"sft.loss_before": 3.1} -> {"sft": {"loss_before": 3.1}}."""
    document: dict[str, Any] = {}
    for path in sorted(facts):
        set_path(document, path, facts[path])
    return document


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. {} if there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document atomically. Raises OSError that names `path`."""
    write_whole(path, (json.dumps(document, indent=2, sort_keys=False) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically. It then has all of `data`, or its old content. Raises OSError that names `path`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # on a full disk other files need the space
        raise OSError(error.errno, error.strerror, str(path)) from error
