"""The benchmark of predictions: its judgement, and that its jobs are valid."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_predict
from e2e.settings import Folder

from dovetail.planner.make_plan import make_plan
from dovetail.tools.calibrate import variant
from helpers.two_cores import MACHINE


def line(job: str, predicted: float, measured: float) -> dict[str, object]:
    seconds = {"predicted": {"seconds": predicted}, "measured": {"seconds": measured}}
    return {"job": job, **seconds, "iterations": [[measured] * 3] * 2, "error": predicted / measured - 1}


def test_what_is_said_of_all_jobs() -> None:
    first, second, *_ = bench_predict.PLANS
    lines = [line("a", 1.1, 1.0), line("b", 1.8, 2.0), line(first, 3.0, 3.3), line(second, 3.1, 3.0)]
    told = bench_predict.judged(lines)
    assert told["median_error"] == pytest.approx(0.0955, abs=1e-3)
    assert told["worst_error"] == pytest.approx(0.1)
    assert told["rank_correlation"] == pytest.approx(0.8)
    assert (told["chosen"], told["chosen_over_best"]) == (first, pytest.approx(1.1))


@pytest.mark.slow
def test_how_sure_the_chosen_plans_time_is() -> None:
    """Iterations vary more than the plans differ: the more rounds, the surer. Without variance there is no doubt."""
    rng = np.random.default_rng(1)
    few, many = ([rng.lognormal(np.log(s), 0.05, (n, 3)).tolist() for s in (1.1, 1.0)] for n in (2, 25))
    for rounds in (few, many):
        low, high = bench_predict.interval(rounds, 0)
        assert low <= bench_predict.chosen_over_best(rounds, 0) <= high
    wide, narrow = (np.ptp(bench_predict.interval(rounds, 0)) for rounds in (few, many))
    assert narrow < wide / 2
    low, high = bench_predict.interval(many, 0)
    assert 1.05 < low <= high < 1.15
    assert bench_predict.interval([[[2.1] * 3], [[2.0] * 3]], 0) == [pytest.approx(1.05)] * 2


def test_a_round_in_which_the_machine_is_slow_changes_no_comparison() -> None:
    """A plan is a tenth slower in every round; the last round takes everybody twice as long."""
    slow, fast = [[1.1], [1.1], [2.2]], [[1.0], [1.0], [2.0]]
    assert bench_predict.chosen_over_best([slow, fast], 0) == pytest.approx(1.1)
    assert bench_predict.interval([slow, fast], 0) == [pytest.approx(1.1)] * 2


def test_its_jobs_differ_in_what_they_run(tmp_path: Path) -> None:
    job = bench_predict.base_job(Folder(tmp_path))
    jobs = {name: variant(job, shape) for name, shape in {**bench_predict.JOBS, **bench_predict.PLANS}.items()}
    assert len(jobs) >= 8
    for each in jobs.values():
        make_plan(each.spec)
        found = bench_predict.predicted(each, MACHINE)
        assert found["seconds"] == pytest.approx(sum(found[name] for name in bench_predict.PHASES))
    assert {each.spec.plan.placement for each in jobs.values()} == {"Flattening", "Interleaving", "Separation"}
