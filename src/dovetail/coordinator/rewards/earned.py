"""The reward function of jobs whose environment or agent says what an episode earned."""

from __future__ import annotations

from typing import Any


def earned(prompts: list[str], responses: list[str], *, earned: list[float | None], **fields: Any) -> list[float]:
    """Return what get_reward returned, or the agent posted. Raises ValueError if it is missing."""
    found = [each for each in earned if each is not None]
    if len(found) < len(responses):
        raise ValueError(
            "an episode has no reward; give the environment's class a method get_reward, or let the agent post it"
        )
    return found


earned.needs = "Sample"  # type: ignore[attr-defined]
