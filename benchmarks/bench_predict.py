"""Whole PPO iterations on this machine, predicted and measured.

    python benchmarks/bench_predict.py [--iterations 3] [--rounds 3] [--runs FOLDER] [--json FILE]
    python benchmarks/bench_predict.py --lag 1 [--iterations 6]

The machine is measured as `dovetail profile --iterations` does it, by four short jobs of one model: once before all
others and once after them, since a machine that others use drifts by more than plans differ. Jobs of other sizes,
placements and schedules are predicted with what these told, and run: one set of constants, nothing of a job that is
predicted is used. Seconds are medians over its iterations after the first ones. One job's possible plans are run in
rounds and compared within each: whether the one that is predicted to be the fastest is, with the interval in which 90 %
of the answers are when rounds and their iterations are drawn again (bootstrap). The model ends a response with
probability 1/32 a token (e2e/model.py). With --runs, run directories are kept, and those that are there already are
read instead of run.

With --lag only the job whose plans are compared is run, without a lag and with it, and both are predicted."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from e2e.settings import Folder, Settings

from dovetail.manifest.resolve import resolve
from dovetail.manifest.sizes import trained_models
from dovetail.manifest.types import RLHFJob
from dovetail.planner.cpus import drawn_on_cpus, predict_iteration
from dovetail.planner.lags import DrawnIterations
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.files.machine_profile import Machine
from dovetail.tools.calibrate import JobShape, calibration_jobs, observe, variant, warmup
from dovetail.tools.calibrate.fit import MeasuredIteration, fit
from dovetail.tools.calibrate.observe import PHASES
from dovetail.tools.calibrate.short_jobs import cores, end_rate, run_one

LAYERS = 4
BASE = Settings(batch=32, mini_batches=2, max_new_tokens=96)
MICRO = 4
DRAWS = 1000
# The job whose plans are compared.
JOB = JobShape(48, 24, 4, 96, trainers=2, rollouts=2)
PLANS = {
    "separation, dp 2": JOB,
    "separation, pp 2": replace(JOB, pp=2),
    "interleaving, dp 2": replace(JOB, placement="Interleaving"),
}
JOBS = {
    "small": JobShape(16, 8, 2, 32, trainers=2, rollouts=2),
    "large": JobShape(96, 32, 8, 96, trainers=2, rollouts=2, fusion=0.0),
    "long responses": JobShape(32, 16, 4, 128, trainers=2, rollouts=2),
    "one trainer": JobShape(32, 8, 2, 64, trainers=1, rollouts=2),
    "one rollout, two epochs": JobShape(32, 16, 2, 64, epochs=2, trainers=2, rollouts=1, fusion=0.0),
    "flattening": JobShape(64, 32, 8, 64, trainers=2, rollouts=2, placement="Flattening", fusion=0.0),
    "pipeline, serial": JobShape(32, 16, 2, 32, trainers=2, rollouts=2, pp=2, schedule="Serial"),
}


def base_job(folder: Folder) -> RLHFJob:
    from e2e.ours import manifest

    job = manifest(folder, BASE)
    ppo = job.spec.ppo.model_copy(update={"micro_batch_size": MICRO})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"ppo": ppo})})


def measured(job: RLHFJob, run_dir: Path) -> list[MeasuredIteration]:
    """Runs the job unless it is there. Raises RunError."""
    plan = make_plan(job.spec) if finished(run_dir) else run_one(job, run_dir)
    return observe(job.spec, plan, run_dir, warmup(job.spec))


def finished(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["state"] == "succeeded")
    except (OSError, ValueError, KeyError):
        return False


def medians(seen: Sequence[MeasuredIteration]) -> dict[str, float]:
    """Of each phase, and of the whole iteration."""
    phases = {name: statistics.median(o.phases[name] for o in seen) for name in PHASES}
    return {**phases, "seconds": statistics.median(sum(o.phases.values()) for o in seen)}


def predicted(job: RLHFJob, machine: Machine) -> dict[str, float]:
    models = [m for m in ("actor", "critic") if m in trained_models(job.spec)]
    plan = make_plan(job.spec)
    placement = job.spec.plan.placement
    assert placement != "Auto"
    phases = predict_iteration(job.spec, machine, models, plan.parallelism["actor"], placement).phases
    return {**phases, "seconds": sum(phases.values())}


# Seconds of iterations, by plan and round.
Rounds = Sequence[Sequence[Sequence[float]]]


def chosen_over_best(rounds: Rounds, chosen: int) -> float:
    """Seconds of the plan `chosen` over those of the fastest plan: medians of each round, as their geometric mean over
    rounds, so that a round in which the machine was slow counts as any other."""
    found = [statistics.fmean(float(np.log(np.median(each))) for each in plan) for plan in rounds]
    return float(np.exp(found[chosen] - min(found)))


def interval(rounds: Rounds, chosen: int) -> list[float]:
    """Between which 90 % of `chosen_over_best` are, rounds of all plans and then each one's iterations drawn with
    replacement (too narrow where there are few)."""
    rng = np.random.default_rng(0)

    def drawn() -> Rounds:
        picked = rng.integers(len(rounds[0]), size=len(rounds[0]))
        return [[rng.choice(plan[i], len(plan[i])).tolist() for i in picked] for plan in rounds]

    found = [chosen_over_best(drawn(), chosen) for _ in range(DRAWS)]
    return [float(value) for value in np.quantile(found, (0.05, 0.95))]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def show(lines: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="seconds of an iteration, predicted / measured")
    table.add_column("job")
    for name in ("iteration", "error", *PHASES):
        table.add_column(name, justify="right")
    for line in lines:
        p, m = line["predicted"], line["measured"]
        cells = [f"{p[name]:.2f} / {m[name]:.2f}" for name in PHASES]
        table.add_row(line["job"], f"{p['seconds']:.2f} / {m['seconds']:.2f}", f"{line['error']:+.1%}", *cells)
    Console(width=150).print(table)


def main(argv: list[str] | None = None) -> int:
    """0 if predictions are as good as promised, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3, help="of a job that are measured")
    parser.add_argument("--rounds", type=int, default=3, help="in which the plans are run in turns")
    parser.add_argument("--lag", type=int, help="compare one job with this lag and without, and nothing else")
    parser.add_argument("--runs", type=Path, help="keep run directories here, and read those that are there")
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args(argv)
    from e2e.model import make_models

    with tempfile.TemporaryDirectory() as temporary:
        work: Path = (options.runs or Path(temporary)).resolve()
        folder = Folder(work / "models")
        if not folder.path.exists():
            make_models(folder, replace(BASE, batch=64))
        job = base_job(folder)
        if options.lag:
            return judge_lag(job, work, options.lag, options.iterations)
        jobs = {name: variant(job, shape, options.iterations) for name, shape in {**JOBS, **PLANS}.items()}
        order = [(name, 0) for name in JOBS] + [(name, turn) for turn in range(options.rounds) for name in PLANS]
        runs: dict[str, list[list[MeasuredIteration]]] = {name: [] for name in jobs}
        seen = calibration(job, work, 0)
        for name, turn in order:
            folder_name = name.replace(", ", "-").replace(" ", "-") + (f"-{turn}" if turn else "")
            runs[name].append(measured(jobs[name], work / folder_name))
        seen += calibration(job, work, 1)
        machine = fit(seen, cores(), end_rate(seen))
        print(machine.model_dump_json())
        lines = [line(name, predicted(made, machine), runs[name]) for name, made in jobs.items()]
    show(lines)
    lines.append(judged(lines))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(text)
    last = lines[-1]
    return 0 if last["median_error"] < 0.1 and last["rank_correlation"] > 0.9 and last["chosen_over_best"] < 1.05 else 1


def judge_lag(job: RLHFJob, work: Path, lag: int, iterations: int) -> int:
    """Print a line for the job without a lag and with it. 0 if both are predicted to 15 %."""
    machine = fit(seen := calibration(job, work, 0), cores(), end_rate(seen))
    plain = variant(job, JOB, iterations)
    expected = predicted_lags(plain, machine)
    lines = []
    for each in (0, lag):
        document = plain.model_dump(mode="json", by_alias=True)
        document["spec"]["ppo"] |= {"lag": each, "oldLogProbs": "Auto"}
        document["spec"]["ppo"]["iterations"] += each
        run_dir = work / f"lag-{each}"
        run_one(RLHFJob.model_validate(document), run_dir)
        rows = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
        seconds = [row["metrics"]["iteration_seconds"] for row in rows if row["stage"] == "ppo"]
        # The last ones have no samples drawn beside them.
        found = statistics.fmean(seconds[warmup(plain.spec) + each : len(seconds) - each])
        told = expected.steady(each).seconds
        error = told / found - 1
        lines.append({"measurement": "predict", "lag": each, "predicted": told, "measured": found, "error": error})
        print(json.dumps(lines[-1]), flush=True)
    return 0 if all(abs(line["error"]) < 0.15 for line in lines) else 1


def predicted_lags(job: RLHFJob, machine: Machine) -> DrawnIterations:
    """Iterations of a job without a lag, to be played with any."""
    models = [m for m in ("actor", "critic") if m in trained_models(job.spec)]
    layout, placement = make_plan(job.spec).parallelism["actor"], job.spec.plan.placement
    assert placement != "Auto"
    spec = resolve(job.spec)
    return drawn_on_cpus(spec, machine, predict_iteration(spec, machine, models, layout, placement))


def calibration(job: RLHFJob, work: Path, turn: int) -> list[MeasuredIteration]:
    made = calibration_jobs(job, LAYERS)
    return [one for n, each in enumerate(made) for one in measured(each, work / f"calibration-{n}-{turn}")]


def line(name: str, expected: dict[str, float], rounds: Sequence[Sequence[MeasuredIteration]]) -> dict[str, Any]:
    found = medians([each for seen in rounds for each in seen])
    return {
        "measurement": "predict",
        "job": name,
        "predicted": expected,
        "measured": found,
        "iterations": [[sum(o.phases.values()) for o in seen] for seen in rounds],
        "error": expected["seconds"] / found["seconds"] - 1,
    }


def judged(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    both = [(line["predicted"]["seconds"], line["measured"]["seconds"]) for line in lines]
    plans = [line for line in lines if line["job"] in PLANS]
    chosen = min(range(len(plans)), key=lambda n: float(plans[n]["predicted"]["seconds"]))
    iterations = [line["iterations"] for line in plans]
    return {
        "measurement": "predict summary",
        "jobs": len(lines),
        "median_error": statistics.median(abs(line["error"]) for line in lines),
        "worst_error": max(abs(line["error"]) for line in lines),
        "rank_correlation": rank_correlation(*zip(*both, strict=True)),
        "chosen": plans[chosen]["job"],
        "chosen_over_best": chosen_over_best(iterations, chosen),
        "interval": interval(iterations, chosen),
        "load_average": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
