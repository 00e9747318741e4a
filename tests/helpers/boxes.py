"""The environment of the tests: a box holds a thing. Open it, and say what is in it."""

from __future__ import annotations

from typing import Any


class Boxes:
    """One tool. An object of this class lives as long as its episode."""

    def reset(self, box: str, thing: str) -> None:
        """Begin an episode with the fields of a prompt's record."""
        self.box, self.thing = box, thing

    def open(self, box: str) -> str:
        """Open a box.

        Args:
            box: The colour of the box.
        """
        return f"a {self.thing}" if box == self.box else "nothing"


def right(
    prompts: list[str], responses: list[str], *, messages: list[list[dict[str, Any]]], thing: list[str], **fields: Any
) -> list[float]:
    """1 for an episode whose last message names the thing, else 0."""
    return [float(said[-1]["content"] == f"a {it}") for said, it in zip(messages, thing, strict=True)]


right.needs = "Sample"  # type: ignore[attr-defined]
