"""The reward function of jobs whose environment says what an episode earned."""

from __future__ import annotations

from typing import Any


def earned(prompts: list[str], responses: list[str], *, earned: list[float | None], **fields: Any) -> list[float]:
    """Return what the environment's get_reward returned. Raises ValueError if it has none."""
    found = [each for each in earned if each is not None]
    if len(found) < len(responses):
        raise ValueError("the environment says nothing of rewards; give its class a method get_reward")
    return found


earned.needs = "Sample"  # type: ignore[attr-defined]
