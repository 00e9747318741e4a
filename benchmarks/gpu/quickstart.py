"""Runs the quickstart's job on the GPU with vLLM, if vLLM is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from dovetail.tools.one_line import product_label
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
        run_dir, manifest = Path(folder) / "run", Path(folder) / "quickstart.yaml"
        document = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
        for group in document["spec"]["groups"]:
            group["gpu"] = {"product": product_label(torch.cuda.get_device_name(0)), "perPod": 1}
        # vLLM measures what is free when it starts, and all the job's processes start on this GPU.
        document["spec"]["groups"][1]["vllmArgs"] = ["--kv-cache-memory-bytes", str(2 << 30)]
        manifest.write_text(yaml.safe_dump(document))
        arguments = ["run", str(manifest), "--run-dir", str(run_dir)]
        done = subprocess.run(
            [sys.executable, "-m", "dovetail.cli.main", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            report.skip("quickstart", (done.stdout + done.stderr).strip().splitlines()[-1])
            return
        lines = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    seconds = [line["metrics"]["iteration_seconds"] for line in lines if line["stage"] == "ppo"]
    report.add(
        "iteration", sorted(seconds)[len(seconds) // 2], "s", note="median; examples/quickstart.yaml, all on this GPU"
    )
