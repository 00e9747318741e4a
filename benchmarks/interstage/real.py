"""Generation and inference of whole jobs of ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dovetail.api.types import RLHFJob
from dovetail.local.launcher import Launcher
from dovetail.planner.simple import make_plan


def stages(job: RLHFJob, run_dir: Path) -> list[dict[str, float]]:
    """Run a job; a row an iteration: seconds of both stages together, of generation, samples migrated, what was
    predicted. Raises RuntimeError if it fails."""
    told: list[str] = []
    with Launcher(job, make_plan(job.spec), run_dir, tell=told.append, environ=os.environ) as launcher:
        outcome = launcher.run(lambda: None)
    if not outcome.succeeded:
        raise RuntimeError(f"our job failed: {outcome.reason}\n" + "\n".join(told[-20:]))
    rows = []
    for line in (run_dir / "history.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["stage"] != "ppo":
            continue
        metrics = entry["metrics"]
        row = {
            "seconds": metrics["seconds_generation"] + metrics["seconds_inference"],
            "generation": metrics["seconds_generation"],
            "migrated": metrics["fusion_migrated"],
            "predicted_speedup": 1.0,
        }
        if "fusion_predicted_seconds" in metrics:
            saved, fused = metrics["fusion_predicted_saved_seconds"], metrics["fusion_predicted_seconds"]
            row["predicted_speedup"] = (fused + saved) / fused
        if "fusion_threshold" in metrics:
            row["threshold"] = metrics["fusion_threshold"]
        rows.append(row)
    return rows
