"""The benchmark of lags: a run of the real coordinator with emulated trainers, rollouts and scorers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_async
from asynchronous.json_lines import print_line
from asynchronous.run import Job, Ran, run
from bench_async import job_of, parts

from dovetail.planner.lags import play


@pytest.fixture(scope="module")
def lagged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Ran]:
    """A small job, and its run with lag 1."""
    job = job_of(count=2, tokens=32, iterations=1, training=2.0, weights=0.05, slow=4.0, samples=2)
    return job, run(job, 1, tmp_path_factory.mktemp("lag") / "run")


@pytest.mark.slow
def test_generation_goes_on_beside_training(lagged: tuple[Job, Ran]) -> None:
    job, ran = lagged
    lengths = [sum(job.lengths(i)) / job.batch for i in range(1, job.iterations + 1)]
    assert [row["response_length"] for row in ran.metrics] == pytest.approx(lengths)
    assert beside(ran) > 0
    assert all(0 <= share <= 1 for share in ran.idle(2, job.iterations))
    predicted = [play(parts(job, ran, ran.known, lag), lag, None, 4, 4, job.iterations) for lag in (0, 1)]
    assert 0 < predicted[1].seconds < predicted[0].seconds


@pytest.mark.slow
def test_each_lag_is_compared_with_none(lagged: tuple[Job, Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    job, ran = lagged
    monkeypatch.setattr(bench_async, "run", lambda *_: ran)
    lines = bench_async.emulate(job, [1, 0, 2])
    assert [line["lag"] for line in lines] == [0, 1, 2]
    assert [line["speedup"] for line in lines] == [1.0] * 3
    assert lines[1]["predicted_speedup"] == lines[0]["predicted_seconds"] / lines[1]["predicted_seconds"] > 1.0


def test_a_line_is_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    print_line({"lag": 1, "seconds": 1.23456789, "within_noise": True})
    assert capsys.readouterr().out == '{"lag": 1, "seconds": 1.2346, "within_noise": true}\n'


def beside(ran: Ran) -> int:
    """How often an instance worked while the trainers trained."""
    works = [each for device in ran.busy.instances for each in device if each[0] > ran.ends[0]]
    return sum(begin < end and start < stop for begin, stop in ran.busy.trainers for start, end in works)
