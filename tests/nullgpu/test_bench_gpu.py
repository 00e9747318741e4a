"""`make bench-gpu` runs to its end. On the null GPU its figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRIVER = Path(__file__).parents[2] / "benchmarks/bench_gpu.py"


def test_every_group_runs_to_its_end(null_gpu_environment: dict[str, str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    environment = {**null_gpu_environment, "NULLGPU_MEETINGS": str(tmp_path / "meetings")}
    command = [sys.executable, str(DRIVER), "--tiny", "--json", str(found), "--logs", str(tmp_path / "logs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850, check=False)
    logs = "\n".join(path.read_text()[-5000:] for path in sorted((tmp_path / "logs").glob("*.log")))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:] + logs
    groups = json.loads(found.read_text())["groups"]
    assert {name: group["state"] for name, group in groups.items()} == dict.fromkeys(groups, "done")
    skipped = {line["name"] for group in groups.values() for line in group["skipped"]}
    assert skipped == {"quickstart", "vLLM's sleep and wake"}
    for name, group in groups.items():
        if name not in ("device", "quickstart"):
            assert any(figure["beside"] is not None for figure in group["figures"]), f"{name} has no anchor"
