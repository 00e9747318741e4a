"""Reads the measured iterations from the files of a finished run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.manifest.sizes import trained_models
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.cpus import work_of
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.process_names import COORDINATOR, is_scorer, is_trainer
from dovetail.protocol.wire import unpack
from dovetail.tools.calibrate.fit import MeasuredIteration

PHASES = ("generation", "inference", "training", "weights", "other")


def observe(spec: RLHFJobSpec, plan: Plan, run_dir: Path, skip: int) -> list[MeasuredIteration]:
    """All iterations of a run after the first `skip`. Their batches must still be there, although checkpoints remove
    old ones. Raises OSError or KeyError if a file is missing or not a run's."""
    layout = plan.parallelism["actor"]
    placed = spec.model_copy(update={"plan": spec.plan.model_copy(update={"placement": _placement(plan)})})
    rows = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    found = []
    for row in rows:
        if row["stage"] == "ppo" and row["step"] > skip:
            found.append(_iteration(placed, layout, run_dir, int(row["step"]), row["metrics"]))
    return found


def run_lengths(run_dir: Path) -> tuple[float, float] | None:
    """The median and sigma of a log-normal distribution of response lengths, in tokens. Its mean and longest length are
    those of the run's iterations. None if there are no lengths."""
    try:
        rows = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
        seen = [row["metrics"] for row in rows if row["stage"] == "ppo"]
        mean, longest, count = (
            statistics.median(m[name] for m in seen) for name in ("response_length", "response_length_max", "samples")
        )
    except (OSError, ValueError, KeyError):
        return None
    # The longest of n is about the (1 - 1 / 2n) quantile; ln mean = ln median + sigma^2 / 2.
    z, gap = NormalDist().inv_cdf(1 - 0.5 / max(1.0, count)), math.log(max(1.0, longest / mean))
    sigma = z - math.sqrt(max(0.0, z * z - 2 * gap))
    return mean * math.exp(-sigma * sigma / 2), sigma


def _placement(plan: Plan) -> str:
    return "Interleaving" if len({tuple(r.scores) for r in plan.rollouts}) > 1 else "Separation"


def _iteration(
    spec: RLHFJobSpec, layout: Parallelism, run_dir: Path, number: int, metrics: dict[str, float]
) -> MeasuredIteration:
    arrays = unpack(ExperienceFiles(run_dir).read(number))
    trace = json.loads((run_dir / "traces" / f"iteration-{number:04d}.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "process_name"}
    spans = [e for e in trace if e["ph"] == "X"]
    models: list[str] = [m for m in ("actor", "critic") if m in trained_models(spec)]
    lengths = (tuple(arrays[name].astype(int).tolist()) for name in ("prompt_lengths", "response_lengths"))
    work = work_of(spec, models, layout, *lengths)
    begun = min(e["ts"] for e in spans if processes[e["pid"]] == COORDINATOR and e["name"] == "generation")
    left = [
        ((e["ts"] - begun) / 1e6, int(e["args"]["value"]))
        for e in trace
        if e["ph"] == "C" and e["name"] == "samples left"
    ]
    passes = {model: sum(e["dur"] for e in _actions(spans, processes, model)) / 1e6 / work.ranks for model in models}
    return MeasuredIteration(
        work=replace(work, fusion=(None,)),
        phases={name: float(metrics[f"seconds_{name}"]) for name in PHASES},
        finished=[(at, count) for at, count in left if count < len(work.responses)],
        batches=list(_batches(spec, spans, processes, work.scores)),
        passes=passes,
        waited=_waited(spans, processes),
    )


def _actions(spans: list[dict[str, Any]], processes: dict[int, str], model: str) -> Iterator[dict[str, Any]]:
    for span in spans:
        if is_trainer(processes[span["pid"]]) and span["name"].startswith(f"{model} "):
            yield span


def _waited(spans: list[dict[str, Any]], processes: dict[int, str]) -> float:
    """The seconds by which the passes of the slowest rank exceed the mean, summed over all mini-batches that have a
    span of their own. 0 if several mini-batches go through a pipeline together."""
    taken: dict[str, dict[int, float]] = {}
    passes = [(e["pid"], e["ts"], e["dur"]) for model in ("actor", "critic") for e in _actions(spans, processes, model)]
    for step in spans:
        if step["name"].startswith("mini-batch ") and is_trainer(processes[step["pid"]]):
            end = step["ts"] + step["dur"]
            mine = sum(dur for rank, at, dur in passes if rank == step["pid"] and step["ts"] <= at < end)
            taken.setdefault(step["name"], {})[step["pid"]] = mine
    return sum(max(ranks.values()) - sum(ranks.values()) / len(ranks) for ranks in taken.values()) / 1e6


def _batches(
    spec: RLHFJobSpec,
    spans: list[dict[str, Any]],
    processes: dict[int, str],
    scores: tuple[tuple[str, ...], ...],
) -> Iterator[tuple[tuple[str, ...], int, float]]:
    names = sorted({name for name in processes.values() if is_scorer(name)})
    held = dict(zip(names, scores, strict=False))
    for span in spans:
        name = processes[span["pid"]]
        if name in held and span["name"] == "inference":
            yield held[name], int(span["args"]["tokens"]), span["dur"] / 1e6
