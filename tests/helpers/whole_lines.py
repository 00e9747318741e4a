"""Files that another process is writing to."""

from __future__ import annotations

from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """The lines of a text file, without one at its end that is still being written."""
    return path.read_text(errors="replace").rpartition("\n")[0].splitlines()
