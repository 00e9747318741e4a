"""The quickstart under every placement, with real processes: it must learn the same within noise.

    python benchmarks/bench_placements.py [--seeds 3] [--runs FOLDER] [--json FILE]

The job of examples/quickstart.yaml, its sizes and steps untouched, with its groups and `plan` changed: Separation in
the manifest's fused pipeline and with data parallel ranks, Interleaving, Flattening, and actor and critic on ranks of
their own. A placement changes the order of sums (1e-7), which sampled tokens magnify from iteration to iteration, so
the curves part as those of other seeds do. Noise is what --seeds seeds of the manifest as it is differ by, and the
error of each figure itself (of 614 pairs, of 128 samples): another placement must end within three standard deviations
of both together, or within the seeds' range. With --runs, run directories are kept, and those that are there already
are read instead of run."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from dovetail.manifest.types import RLHFJob
from dovetail.tools.calibrate.short_jobs import run_one

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
AS_IT_IS = "separation, pp 2"
ONE_KIND = [{"name": "pods", "roles": ["trainer", "rollout"], "replicas": 2}]
PLACEMENTS: dict[str, dict[str, Any]] = {
    AS_IT_IS: {"plan": {"placement": "Separation", "parallelism": {"actor": {"pp": 2}}}},
    "separation, dp 2": {"plan": {"placement": "Separation", "parallelism": {"actor": {"dp": 2}, "critic": {"dp": 2}}}},
    "interleaving": {"plan": {"placement": "Interleaving", "parallelism": {"actor": {"pp": 2}}}},
    "flattening": {"plan": {"placement": "Flattening", "parallelism": {"actor": {"pp": 2}}}, "groups": ONE_KIND},
    "dedicated ranks": {"plan": {"placement": "Separation", "intraStageFusion": "Dedicated"}},
}
DEVIATIONS = 3.0


def job(placement: str, seed: int) -> RLHFJob:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"] |= {**PLACEMENTS[placement], "seed": seed}
    return RLHFJob.model_validate(document)


def result(name: str, seed: int, work: Path) -> dict[str, Any]:
    """Raises RunError if the job fails."""
    run_dir = work / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    summary = run_dir / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["state"] != "succeeded":
        run_one(job(name, seed), run_dir)
    found = json.loads(summary.read_text())
    return {
        "measurement": "placement",
        "placement": name,
        "seed": seed,
        "sft_loss": found["sft"]["loss_after"],
        "reward_model_accuracy": accuracy(**found["reward_model"]),
        **found["ppo"],
        "iterations_seconds": sum(found["phases"].values()),
        "samples_per_second": found["samples_per_second"],
    }


def accuracy(accuracy: float, pairs: float) -> dict[str, float]:
    """With its binomial error."""
    return {"mean": accuracy, "ci95": 1.96 * (accuracy * (1 - accuracy) / pairs) ** 0.5}


def same(value: Mapping[str, float], noise: Sequence[Mapping[str, float]]) -> bool:
    """Whether a value could be one of `noise`."""
    means = [each["mean"] for each in noise]
    spread = DEVIATIONS * math.hypot(statistics.stdev(means), value["ci95"] / 1.96)
    return abs(value["mean"] - statistics.mean(means)) <= spread or min(means) <= value["mean"] <= max(means)


def judged(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which placements did not learn the same; the least seed's lines are compared with all of AS_IT_IS."""
    apart = []
    for name in PLACEMENTS:
        for key in ("sft_loss", "reward_model_accuracy", "reward_first", "reward_last"):
            seeds = [_figure(line[key]) for line in lines if line["placement"] == AS_IT_IS]
            values = [_figure(line[key]) for line in lines if line["placement"] == name and name != AS_IT_IS]
            apart += [f"{name}: {key} {value['mean']:.3g}" for value in values if not same(value, seeds)]
    rises = all(
        line["reward_last"]["mean"] - line["reward_last"]["ci95"]
        > line["reward_first"]["mean"] + line["reward_first"]["ci95"]
        for line in lines
    )
    return {"measurement": "placements summary", "apart": apart, "reward_rises": rises}


def _figure(value: Any) -> Mapping[str, float]:
    return value if isinstance(value, Mapping) else {"mean": float(value), "ci95": 0.0}


def show(lines: list[dict[str, Any]]) -> None:
    table = Table(title="the quickstart under every placement")
    for name in ("placement", "seed"):
        table.add_column(name)
    names = ("SFT loss", "reward model", "reward first", "last", "KL last", "iterations, s", "samples/s")
    for name in names:
        table.add_column(name, justify="right")
    for line in lines:
        ranges = [f"{line[k]['mean']:.2f} ± {line[k]['ci95']:.2f}" for k in ("reward_first", "reward_last", "kl_last")]
        table.add_row(
            line["placement"],
            str(line["seed"]),
            f"{line['sft_loss']:.4f}",
            f"{line['reward_model_accuracy']['mean']:.1%}",
            *ranges,
            f"{line['iterations_seconds']:.1f}",
            f"{line['samples_per_second']:.0f}",
        )
    Console(width=150).print(table)


def main(argv: list[str] | None = None) -> int:
    """0 if every placement learnt the same within noise and the reward rose in all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of the manifest as it is; at least 2")
    parser.add_argument("--runs", type=Path, help="keep run directories here, and read those that are there")
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one seed has no noise")
    with tempfile.TemporaryDirectory() as temporary:
        work: Path = (options.runs or Path(temporary)).resolve()
        runs = [(AS_IT_IS, seed) for seed in range(options.seeds)]
        runs += [(name, 0) for name in PLACEMENTS if name != AS_IT_IS]
        lines = [result(name, seed, work) for name, seed in runs]
    show(lines)
    verdict = judged(lines)
    text = "".join(json.dumps(line) + "\n" for line in [*lines, verdict])
    print(text, end="")
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(text)
    return 0 if verdict["reward_rises"] and not verdict["apart"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
