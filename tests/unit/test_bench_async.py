"""The benchmark of lags: a run of the real coordinator with emulated trainers, rollouts and scorers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from asynchronous.run import Ran, run
from bench_async import job_of, parts

from dovetail.planner.simulate.lanes import play


def test_generation_goes_on_beside_training(tmp_path: Path) -> None:
    job = job_of(count=2, tokens=32, iterations=1, training=2.0, weights=0.05, slow=4.0, samples=2)
    ran = run(job, 1, tmp_path / "run")
    lengths = [sum(job.lengths(i)) / job.batch for i in range(1, job.iterations + 1)]
    assert [row["response_length"] for row in ran.metrics] == pytest.approx(lengths)
    assert beside(ran) > 0
    assert all(0 <= share <= 1 for share in ran.idle(2, job.iterations))
    predicted = [play(parts(job, ran, ran.known, lag), lag, None, 4, 4, job.iterations) for lag in (0, 1)]
    assert 0 < predicted[1].seconds < predicted[0].seconds


def test_trainers_learn_from_samples_as_they_come(tmp_path: Path) -> None:
    job = job_of(count=2, tokens=32, iterations=1, training=1.0, weights=0.05, slow=8.0, samples=32, each=2)
    ran = run(replace(job, streaming=True), 0, tmp_path / "run")
    assert any(row["streamed_seconds"] > 0 for row in ran.metrics)
    assert beside(ran) > 0
    left = [sum(part.training.values()) for part in parts(replace(job, streaming=True), ran, ran.known, 0)]
    assert all(
        some <= whole.training["training"] + whole.training["other"]
        for some, whole in zip(left, parts(job, ran, ran.known, 0), strict=True)
    )


def beside(ran: Ran) -> int:
    """How often an instance worked while the trainers trained."""
    works = [each for device in ran.busy.instances for each in device if each[0] > ran.ends[0]]
    return sum(begin < end and start < stop for begin, stop in ran.busy.trainers for start, end in works)
