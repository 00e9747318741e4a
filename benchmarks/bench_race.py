"""GRPO against TRL's GRPOTrainer: the same optimizer steps, and runs of three small tasks side by side.

    python benchmarks/bench_race.py [--seeds 5] [--tasks sort reverse sums] [--parts steps race] [--runs FOLDER]

Steps: TRL trains a few optimizer steps. Our trainer's step command makes them once more from TRL's samples, rewards and
log-probabilities. A case passes if the changes that the steps made to the weights agree to a thousandth (L2 norm of the
difference over that of TRL's change). Two cases are measured and not judged, because the losses differ there.

Race: for each task one base model (two layers of 64, SFT until it is right now and then), and the same prompts, rewards
and settings for both. `ours` has TRL's AdamW (beta2 0.999, linear decay, no warm-up), `ours, own AdamW` our defaults
(beta2 0.95, cosine, 3% warm-up). There the trainer and the order of the prompts are ours, and the samples are drawn in
this process, because a job's servers take longer to start than such a run. One program judges all results on 256
held-out prompts. Runs that are in --runs are read."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from race import ours, trl_grpo
from race.models import judge_folder, make_base
from race.tasks import SETTINGS, TASKS
from rich.console import Console
from rich.table import Table

SYSTEMS: dict[str, dict[str, Any] | None] = {"TRL": None, "ours": ours.TRL_OPTIMIZER, "ours, own AdamW": {}}
CLOSE = 1e-3
TWICE = {"mini_batches": 2, "epochs": 2, "iterations": 2}
CASES: dict[str, dict[str, Any]] = {
    "token mean (dapo)": {},
    "sequence mean (grpo), weight decay": {"aggregation": "Sequence", "weight_decay": 0.1},
    "Dr. GRPO": {"aggregation": "Constant", "normalize_std": False},
    "sequence mean, 2 mini-batches, 2 epochs, clip-higher": {**TWICE, "aggregation": "Sequence", "clip_high": 0.28},
    "GSPO, 2 mini-batches, 2 epochs": {**TWICE, "aggregation": "Sequence", "loss": "gspo"},
    "CISPO, 2 epochs": {"loss": "cispo", "epochs": 2, "iterations": 2, "clip_high": 0.28},
}
# TRL divides the sum over a mini-batch's tokens by the mean count of all mini-batches, and its k3 has its own gradient.
OTHERS: dict[str, dict[str, Any]] = {
    "token mean, 2 mini-batches, 2 epochs": TWICE,
    "KL in the loss, coefficient 0.05": {"kl_coef": 0.05},
}


def compare_steps(base: Path) -> list[dict[str, Any]]:
    """One JSON line a case."""
    lines = []
    for name, case in (CASES | OTHERS).items():
        settings = SETTINGS | {"iterations": 4} | case
        steps = trl_grpo.run(base, settings, 0, None).steps
        found = ours.repeat(ours.manifest(base, settings, 0, ours.TRL_OPTIMIZER), base, steps)
        lines.append({"measurement": "steps", "case": name, "steps": len(steps), "judged": name in CASES, **found})
    return lines


def race(base: Path, task: str, seed: int, system: str, work: Path) -> dict[str, Any]:
    """The JSON line of a run."""
    folder = work / f"{task}-{seed}-{list(SYSTEMS).index(system)}"
    found = folder / "result.json"
    if not found.exists():
        folder.mkdir(exist_ok=True)
        optimizer, model = SYSTEMS[system], folder / "model"
        if optimizer is None:
            rewards = trl_grpo.run(base, SETTINGS, seed, model).rewards
        else:
            job = ours.manifest(base, SETTINGS, seed, optimizer)
            rewards = ours.run(job, base, model)
        line = {"measurement": "race", "task": task, "seed": seed, "system": system}
        line |= judge_folder(model, base) | {"last_rewards": statistics.fmean(rewards[-10:])}
        found.write_text(json.dumps(line | {"rewards": rewards}))
    return {name: value for name, value in json.loads(found.read_text()).items() if name != "rewards"}


def differences(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of our systems less TRL, over the pairs of one task and seed, with the standard error of the mean."""
    scores = {(each["system"], each["task"], each["seed"]): each["sampled"] for each in lines}
    found = []
    for system in SYSTEMS:
        pairs = [
            scores[key] - scores["TRL", *key[1:]] for key in scores if key[0] == system and ("TRL", *key[1:]) in scores
        ]
        if system != "TRL" and len(pairs) > 1:
            error = statistics.stdev(pairs) / len(pairs) ** 0.5
            mean = statistics.fmean(pairs)
            found.append(
                {"measurement": "race difference", "system": system, "pairs": len(pairs), "mean": mean, "se": error}
            )
    return found


def show(lines: list[dict[str, Any]]) -> None:
    console = Console(width=130)
    steps = [line for line in lines if line["measurement"] == "steps"]
    table = Table("TRL's steps by our trainer", "steps", "difference / change", "largest difference of an advantage")
    for line in steps:
        table.add_row(line["case"], str(line["steps"]), f"{line['difference']:.1e}", f"{line['advantages']:.1e}")
    console.print(table)
    runs = [line for line in lines if line["measurement"] == "race"]
    table = Table("task", "system", "seeds", "sampled", "greedy", "last ten rewards")
    for task in dict.fromkeys(line["task"] for line in runs):
        for system in dict.fromkeys(line["system"] for line in runs):
            some = [line for line in runs if (line["task"], line["system"]) == (task, system)]
            if some:
                table.add_row(
                    task, system, str(len(some)), *(_mean(some, k) for k in ("sampled", "greedy", "last_rewards"))
                )
    console.print(table)
    for line in lines:
        if line["measurement"] == "race difference":
            console.print(f"{line['system']} less TRL: {line['mean']:+.4f} ± {line['se']:.4f} ({line['pairs']} pairs)")


def _mean(lines: list[dict[str, Any]], key: str) -> str:
    """Mean and standard error."""
    values = [line[key] for line in lines]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def main(argv: list[str] | None = None) -> int:
    """0 if all judged steps agree, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--runs", type=Path, help="keep runs here, and read those that are there")
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    parser.add_argument("--parts", nargs="*", choices=("steps", "race"), default=["steps", "race"])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work: Path = (options.runs or Path(temporary)).resolve()
        for task in TASKS:
            if not (work / "base" / task / "model.safetensors").exists():
                make_base(task, work / "base" / task)
        lines = []
        if "steps" in options.parts:
            lines = compare_steps(work / "base" / "sort")
        # By seeds first, so that a run that is stopped has as many of each task.
        for seed in range(options.seeds if "race" in options.parts else 0):
            for task, system in itertools.product(options.tasks, options.systems):
                lines.append(race(work / "base" / task, task, seed, system, work))
    lines += differences([line for line in lines if line["measurement"] == "race"])
    show(lines)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(text)
    wrong = [line["case"] for line in lines if line.get("judged") and line["difference"] > CLOSE]
    if wrong:
        print(f"TRL and ours disagree on: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
