"""A reward function for jobs whose training uses no rewards, such as on-policy distillation."""

from __future__ import annotations

from typing import Any


def zero(prompts: list[str], responses: list[str], **fields: Any) -> list[float]:
    """Return 0 for each response."""
    return [0.0] * len(responses)


zero.needs = "Sample"  # type: ignore[attr-defined]
