"""Runs the ranks of a worker program, such as tests/e2e/context_parallel_worker.py, and checks how they ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def run_ranks(worker: Path, folder: Path, *words: str) -> None:
    """Run `worker` with `folder`, in which it leaves its ranks' logs and exit codes, one list for each phase."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, str(worker), str(folder), *words], env=environment, check=True, timeout=3500)
    found = json.loads((folder / "statuses.json").read_text())
    if any(status for phase in found for status in phase):
        logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in folder.glob("*.log"))
        raise AssertionError(f"ranks ended with {found}:\n{logs}")


def results_of(worker: Path, folder: Path, ran: Sequence[tuple[str, int, int]]) -> dict[str, list[Any]]:
    """What each rank of each scenario found. `ran`: the scenarios, with their ranks and the number of a case."""
    run_ranks(
        worker,
        folder,
        json.dumps(
            [[{"scenario": name, "world": w, "rank": r, "case": f"-{case}"} for r in range(w)] for name, w, case in ran]
        ),
    )
    return {
        f"{name} {world} {case}": [torch.load(folder / f"{name}-{world}-{r}-{case}.pt") for r in range(world)]
        for name, world, case in ran
    }
