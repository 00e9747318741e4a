"""Runs the quickstart's job with vLLM, if vLLM is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.report import Report
from gpu.scale import Scale

ROOT = Path(__file__).parents[2]


def run(scale: Scale, report: Report) -> None:
    if importlib.util.find_spec("vllm") is None:
        report.skip("quickstart", "vLLM is not installed")
        return
    if scale.name == "tiny":
        report.skip("quickstart", "not at this size")
        return
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        run_dir = Path(folder) / "run"
        arguments = ["run", str(ROOT / "examples/quickstart.yaml"), "--run-dir", str(run_dir)]
        done = subprocess.run(
            [sys.executable, "-m", "dovetail.cli.main", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            report.skip("quickstart", (done.stdout + done.stderr).strip().splitlines()[-1])
            return
        lines = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    seconds = [line["metrics"]["iteration_seconds"] for line in lines if line["stage"] == "ppo"]
    report.add("iteration", sorted(seconds)[len(seconds) // 2], "s", note="median; examples/quickstart.yaml")
