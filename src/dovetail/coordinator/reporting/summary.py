"""Builds summary.json, the results of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


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
