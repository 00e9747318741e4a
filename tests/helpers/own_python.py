"""A Python beside the project's, for programs that do not fit into the same environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

UV = Path(sys.executable).with_name("uv")


def installed(folder: Path, *packages: str) -> Path:
    """The Python of a new environment in `folder`, with these packages from a registry."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([UV, "venv", "-q", "-p", sys.executable, folder / "venv"], check=True)
    subprocess.run([UV, "pip", "install", "-q", "-p", python, *packages], check=True)
    return python
