"""The benchmark of placements: its judgement, and that its jobs differ in placement only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_placements

from dovetail.planner.make_plan import make_plan


def line(placement: str, seed: int, last: float, accuracy: float = 0.95) -> dict[str, Any]:
    return {
        "placement": placement,
        "seed": seed,
        "sft_loss": 0.66 + 0.01 * seed,
        "reward_model_accuracy": bench_placements.accuracy(accuracy + 0.002 * seed, pairs=614),
        "reward_first": {"mean": -0.5 + 0.1 * seed, "ci95": 0.4},
        "reward_last": {"mean": last, "ci95": 0.1},
    }


SEEDS = [line(bench_placements.AS_IT_IS, seed, last) for seed, last in enumerate((3.0, 3.2, 2.7))]


def test_another_placement_may_differ_as_seeds_do() -> None:
    others = [line("flattening", 0, 2.8), line("interleaving", 0, 3.1, accuracy=0.945)]
    verdict = bench_placements.judged([*SEEDS, *others])
    assert verdict["apart"] == []
    assert verdict["reward_rises"]


def test_what_learns_less_or_not_at_all_is_named() -> None:
    verdict = bench_placements.judged([*SEEDS, line("flattening", 0, 0.1), line("interleaving", 0, 3.0, accuracy=0.6)])
    assert verdict["apart"] == ["interleaving: reward_model_accuracy 0.6", "flattening: reward_last 0.1"]
    assert bench_placements.judged([*SEEDS, line("flattening", 0, -0.4)])["reward_rises"] is False


@pytest.mark.parametrize("name", bench_placements.PLACEMENTS)
def test_jobs_are_the_quickstart_elsewhere(name: str) -> None:
    given, plain = bench_placements.job(name, 0).spec, bench_placements.job(bench_placements.AS_IT_IS, 0).spec
    same = {"plan", "groups"}
    assert given.model_dump(exclude=same) == plain.model_dump(exclude=same)
    scored = [set(rollout.scores) for rollout in make_plan(given).rollouts]
    assert set.union(*scored) == {"reference", "reward", "critic"}
    assert (scored[0] == scored[1]) is (name != "interleaving")
