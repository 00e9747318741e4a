"""Whole jobs of ours, as `dovetail run` starts them, and what their history says of each iteration."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob
from dovetail.planner.make_plan import make_plan
from e2e.settings import Folder, Settings

PHASES = ("generation", "inference", "training", "weights", "other")
# A rank's share of a mini-batch in one piece: rows are packed, so a larger micro-batch only saves overhead.
MICRO_BATCH = 8


def manifest(folder: Folder, settings: Settings, trainers: int = 2, rollouts: int = 2) -> RLHFJob:
    """The job with the settings that TRL gets. TRL clips neither rewards nor gradients; AdamW's numbers are its."""
    optimizer = {
        "learningRate": settings.learning_rate,
        "beta2": 0.999,
        "schedule": "Constant",
        "warmupFraction": 0.0,
        "maxGradNorm": 1e9,
    }
    models = {"actor": folder.actor, "critic": folder.critic, "reward": folder.reward}
    mini = settings.batch // settings.mini_batches
    spec = {
        "seed": settings.seed,
        "stages": ["ppo"],
        "models": {name: {"source": {"path": str(path)}} for name, path in models.items()},
        "data": {
            "prompts": [{"path": str(folder.prompts)}],
            "heldOut": 0.0,
            "maxPromptTokens": settings.prompt_tokens,
        },
        "ppo": {
            "iterations": settings.iterations,
            "globalBatchSize": settings.batch,
            "miniBatchSize": mini,
            "microBatchSize": min(MICRO_BATCH, mini // trainers),
            "epochs": settings.epochs,
            "clip": settings.clip,
            "valueClip": settings.value_clip,
            "valueCoef": settings.value_coef,
            "gamma": settings.gamma,
            "lam": settings.lam,
            "rewardClip": None,
            "kl": {"coef": settings.kl_coef},
            "actorOptimizer": optimizer,
            "criticOptimizer": optimizer,
        },
        "generation": {"maxTokens": settings.max_new_tokens},
        "groups": [
            {"name": "trainers", "roles": ["trainer"], "replicas": trainers},
            {"name": "rollouts", "roles": ["rollout"], "replicas": rollouts},
        ],
        # As TRL: none until the end, which is not measured.
        "checkpoint": {"everySteps": 1_000_000},
        "failurePolicy": {"peerTimeoutSeconds": 300},
    }
    return RLHFJob.model_validate(
        {"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJob", "metadata": {"name": "bench"}, "spec": spec}
    )


@dataclass
class CpuMeter:
    """CPU and wall seconds of this process's descendants, noted whenever the job has finished another iteration."""

    history: Path
    marks: list[tuple[float, float]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def __call__(self) -> None:
        lines = self.history.read_bytes().count(b"\n") if self.history.exists() else 0
        if lines >= len(self.marks):
            self.marks.append((_cpu_seconds(), time.monotonic() - self.begun))

    def of(self, iteration: int) -> float | None:
        """CPU seconds of an iteration (from 1), to the launcher's polling interval."""
        if iteration >= len(self.marks):
            return None
        return self.marks[iteration][0] - self.marks[iteration - 1][0]


def _cpu_seconds() -> float:
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def run(job: RLHFJob, run_dir: Path, meter: CpuMeter | None = None) -> list[dict[str, float]]:
    """Run a job; its rows as in `read_rows`. Raises RuntimeError if it fails."""
    told: list[str] = []
    meter = meter or CpuMeter(run_dir / "history.jsonl")
    with Launcher(job, make_plan(job.spec), run_dir, tell=told.append) as launcher:
        outcome = launcher.run(meter)
    if not outcome.succeeded:
        raise RuntimeError(f"our job failed: {outcome.reason}\n" + "\n".join(told[-20:]))
    return read_rows(run_dir / "history.jsonl", meter)


def read_rows(history: Path, meter: CpuMeter | None = None) -> list[dict[str, float]]:
    """A row an iteration, in order: `seconds`, each phase's seconds, `response_length`, `cpu_seconds` if metered."""
    rows = []
    for line in history.read_text().splitlines():
        entry: dict[str, Any] = json.loads(line)
        if entry["stage"] != "ppo":
            continue
        metrics = entry["metrics"]
        row = {name: float(metrics.get(f"seconds_{name}", 0.0)) for name in PHASES}
        row["seconds"] = float(metrics["iteration_seconds"])
        row["response_length"] = float(metrics["response_length"])
        cpu = meter.of(len(rows) + 1) if meter is not None else None
        if cpu is not None:
            row["cpu_seconds"] = cpu
        rows.append(row)
    return rows
