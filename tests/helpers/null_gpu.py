"""What tests on the null GPU see of a scenario (tests/nullgpu/conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Ended:
    """How a scenario ended. Each list has one entry a rank: `statuses` are exit codes, `results` what the programs
    returned. `waits` holds by rank what a rank that was stuck waited for."""

    folder: Path
    statuses: list[int]
    waits: dict[str, str]
    results: list[Any]
    seconds: float

    @property
    def log(self) -> str:
        """What all ranks wrote, the last 30,000 characters of each."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-30000:]}" for path in logs)

    def good(self) -> list[Any]:
        """The results of all ranks. Fails the test if a rank failed or was stuck."""
        assert not any(self.statuses), f"{self.statuses} {self.waits}\n{self.log}"
        return self.results


Run = Callable[..., Ended]
