"""The environment of examples/agent.yaml: each box holds a thing. Open the right one, and say what is in it."""

from __future__ import annotations

from typing import Any


class Boxes:
    """One tool. An object of this class lives as long as its episode."""

    def reset(self, box: str, things: dict[str, str]) -> None:
        """Begin an episode with the fields of a prompt's record."""
        self.things = things

    def open(self, box: str) -> str:
        """Open a box.

        Args:
            box: The colour of the box.
        """
        if box not in self.things:
            raise ValueError("there is no such box")
        return f"a {self.things[box]}"


def right(
    prompts: list[str],
    responses: list[str],
    *,
    messages: list[list[dict[str, Any]]],
    box: list[str],
    things: list[dict[str, str]],
    **fields: Any,
) -> list[float]:
    """1 for an episode whose last message names what is in the box that was asked for, else 0."""
    wanted = [f"a {held[asked]}" for asked, held in zip(box, things, strict=True)]
    return [float(said[-1]["content"] == thing) for said, thing in zip(messages, wanted, strict=True)]


right.needs = "Sample"  # type: ignore[attr-defined]
