"""Runs a whole job of SFT and DPO on the GPU with the processes of `dovetail run`. It runs once undisturbed, and once
with its trainer killed in the middle. It generates nothing, so it needs no vLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dovetail.tools.one_line import product_label
from gpu.report import Report
from gpu.scale import Scale

NEEDED = ("aiohttp", "cel_expr_python", "datasets", "jinja2", "prometheus_client", "tensorboard", "yaml")
SFT_STEPS, DPO_STEPS, KILLED_AT = 40, 30, 14
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def run(scale: Scale, report: Report) -> None:
    if scale.name == "tiny":
        report.skip("job", "not at this size")
        return
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        report.skip("job", f"these packages of the coordinator are not installed: {', '.join(absent)}")
        return
    product = product_label(torch.cuda.get_device_name(0))
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        alone, killed = Path(folder, "alone"), Path(folder, "killed")
        seconds = _run(product, alone, kill=False)
        back = _run(product, killed, kill=True)
        steps = [line for line in _history(alone) if line["stage"] == "dpo"]
        beside = statistics.median(line["metrics"]["seconds"] for line in steps)
        files = {path.relative_to(alone): path for path in (alone / "models").rglob("*.safetensors")}
        equal = [_digest(path) == _digest(killed / name) for name, path in files.items()]
    note = f"{SFT_STEPS} steps of SFT and {DPO_STEPS} of DPO, {LLAMA['num_hidden_layers']} layers of width 1024"
    report.add("job", seconds, "s", note=note)
    report.add("step of DPO", 1e3 * beside, "ms", note="median")
    report.add("files of weights that are equal after a kill", sum(equal), "", "all files", len(equal))
    report.add(
        "kill to the next new step", back, "s", note=f"killed after {KILLED_AT} steps of DPO, which are repeated"
    )


def _job(product: str) -> dict[str, Any]:
    return {
        "apiVersion": "dovetail.dev/v1beta1",
        "kind": "RLHFJob",
        "metadata": {"name": "bench"},
        "spec": {
            "stages": ["sft", "dpo"],
            "models": {
                "actor": {"source": {"scratch": {"architecture": "llama", "config": LLAMA}}},
                "tokenizer": {"train": {"vocabSize": 512}},
            },
            "data": {
                "demonstrations": [{"synthetic": {"size": 4096}}],
                "preferences": [{"synthetic": {"size": 4096}}],
                "maxPromptTokens": 96,
                "maxTokens": 224,
                "heldOut": 0.05,
            },
            "sft": {
                "steps": SFT_STEPS,
                "batchSize": 32,
                "microBatchSize": 16,
                "optimizer": {"learningRate": 5e-4, "warmupFraction": 0.05},
            },
            "dpo": {
                "steps": DPO_STEPS,
                "batchSize": 32,
                "microBatchSize": 16,
                "optimizer": {"learningRate": 5e-5, "warmupFraction": 0.05},
            },
            "groups": [{"name": "trainers", "roles": ["trainer"], "gpu": {"product": product, "perPod": 1}}],
            "checkpoint": {"everySteps": 10, "keep": 2},
        },
    }


def _run(product: str, run_dir: Path, kill: bool) -> float:
    """The seconds of the job. With `kill` they are the seconds from the kill until a step that had not been done
    before. Raises RuntimeError if the job fails."""
    from dovetail.launch.local.launcher import Launcher
    from dovetail.manifest.types import RLHFJob
    from dovetail.planner.make_plan import make_plan

    job = RLHFJob.model_validate(_job(product))
    launcher = Launcher(job, make_plan(job.spec), run_dir)
    start = time.monotonic()
    killed, back = 0.0, 0.0

    def look() -> None:
        nonlocal killed, back
        done = sum(line["stage"] == "dpo" for line in _history(run_dir))
        if kill and not killed and done >= KILLED_AT:
            os.kill(launcher.pids["trainer-0"], signal.SIGKILL)
            killed = time.monotonic()
        elif killed and not back and done > KILLED_AT + 2:
            back = time.monotonic()

    with launcher:
        outcome = launcher.run(on_step=look)
    if not outcome.succeeded:
        raise RuntimeError(outcome.reason)
    return back - killed if kill else time.monotonic() - start


def _history(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
