"""Learning curves at equal steps without a lag and with several: real jobs of a tiny model on this machine."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from asynchronous.json_lines import print_line
from asynchronous.run import MANIFEST
from dovetail.coordinator.reporting.page.overview import last_of_each_step
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.manifest.documents import parse
from dovetail.manifest.types import RLHFJob
from dovetail.tools.calibrate.short_jobs import run_one

ITERATIONS, SAMPLES = 30, 64
# The iterations at the end that count.
LAST = 5
CODE = """
def score(prompts, responses, **fields):
    return [10 * text.count("e") / max(1, len(text)) for text in responses]
"""


def job_of(folder: Path, lag: int, seed: int) -> RLHFJob:
    """GRPO from random weights: responses are to have many letters of one kind."""
    document = yaml.safe_load(MANIFEST)
    document["spec"] |= {
        "seed": seed,
        "stages": ["ppo"],
        "groups": [
            {"name": "trainers", "roles": ["trainer"], "replicas": 1},
            {"name": "rollouts", "roles": ["rollout"], "replicas": 1},
        ],
        "generation": {"maxTokens": 24, "minTokens": 24},
        "evaluation": {"heldOut": 0},
        "ppo": {
            "lag": lag,
            "advantage": "grpo",
            "samplesPerPrompt": 4,
            "iterations": ITERATIONS,
            "globalBatchSize": SAMPLES,
            "miniBatchSize": SAMPLES // 2,
            "microBatchSize": 16,
            "kl": {"coef": 0.01},
            "actorOptimizer": {"learningRate": 1e-3, "schedule": "Constant", "warmupFraction": 0.0},
        },
    }
    document["spec"]["data"] = {
        "demonstrations": [{"synthetic": {"size": 200}}],
        "prompts": [{"synthetic": {"size": 200}}],
        "maxPromptTokens": 64,
    }
    document["spec"]["models"]["reward"] = {"function": "letters:score", "importPath": str(folder), "workers": 1}
    return parse(document)


def compare_curves(lags: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Prints and returns a line for each lag: the reward of the first and of the last iterations, mean over seeds, the
    interval of 95% of that mean, and whether the last ones are within the noise of those without a lag."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "letters.py").write_text(CODE)
        ends: dict[int, list[float]] = {}
        for lag in lags:
            found = []
            for seed in range(seeds):
                run_dir = folder / f"{lag}-{seed}"
                run_one(job_of(folder, lag, seed), run_dir)
                found.append(
                    [row["metrics"]["reward"] for row in last_of_each_step(RunFolder(run_dir).rows(), "ppo").values()]
                )
            ends[lag] = [statistics.fmean(each[-LAST:]) for each in found]
            noise = error(ends[lag])
            line = {
                "measurement": "async curves",
                "lag": lag,
                "seeds": seeds,
                "reward_first": statistics.fmean(each[0] for each in found),
                "reward_last": statistics.fmean(ends[lag]),
                "interval": noise,
                "within_noise": abs(statistics.fmean(ends[lag]) - statistics.fmean(ends[lags[0]]))
                <= math.hypot(noise, error(ends[lags[0]])),
            }
            lines.append(line)
            print_line(line)
    return lines


def error(values: Sequence[float]) -> float:
    """Half of the interval in which 95% of such means are, by the scatter of the values (Student's t)."""
    quantile = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.5)
    return quantile * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
