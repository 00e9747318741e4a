"""Runs the scenarios of tests/nullgpu, and what tests see of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
WORKER = Path(__file__).parents[1] / "nullgpu/worker.py"


@contextmanager
def scenarios(folder: Path, environment: dict[str, str]) -> Iterator[Run]:
    """`run(name, do, world=1, ...)` runs the scenario once, in ranks with this environment; see worker.py."""
    with subprocess.Popen(
        [sys.executable, str(WORKER), str(folder)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        ended: dict[str, Ended] = {}

        def run(name: str, do: str, **more: Any) -> Ended:
            if name not in ended:
                assert worker.stdin is not None
                assert worker.stdout is not None
                print(json.dumps({"name": name, "do": do, **more}), file=worker.stdin, flush=True)
                answer = worker.stdout.readline()
                assert answer, "the process that forks ranks has died"
                ended[name] = Ended(folder / name, **json.loads(answer))
            return ended[name]

        yield run
