"""Schedules of many ranks, stretched from those of few."""

import itertools

import numpy as np
import pytest

from dovetail.pipelines import (
    ModelPipelines,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    evaluate,
    family_instance,
    family_of,
    find,
    fused_problem,
    serial_memory,
    steps,
)
from dovetail.pipelines.search import scaling
from dovetail.pipelines.search.scaling import fewer_ranks, stretch


def nothing():
    """The effort of a search whose time is up at once: each search runs its first round."""
    return SearchEffort(seconds=0, clock=itertools.count().__next__, scale=0.1, memory=False, exact=False)


@pytest.fixture(autouse=True)
def small_enough(monkeypatch):
    """What the tests call a large problem has 16 ranks."""
    monkeypatch.setattr(scaling, "SMALL", 8)


def problem(stages, count, share=1.0):
    free = fused_problem(stages, stages // 2, count, 1, 0.2, critic_activation=0.3, communication=0.02)
    limit = serial_memory(free) * share
    return fused_problem(
        stages, stages // 2, count, 1, 0.2, critic_activation=0.3, communication=0.02, memory_limit=limit
    )


@pytest.mark.parametrize("name", ["fused", "fused-split", "fused-v"])
def test_a_stretched_schedule_runs_within_the_limit_and_is_as_near_to_the_bound(name):
    family = family_of(name)
    large = problem(16, 32)
    small = fewer_ranks(large, family)
    assert (small.ranks, small.models[0].micro_batches, small.models[1].micro_batches) == (8, 16, 8)
    assert small.memory_limit == large.memory_limit / 2
    found = find(small, family, nothing())
    instance = family_instance(large, family)
    ends = []
    for orders in stretch(instance, found):
        longer = evaluate(instance, orders)
        check_steps(large, steps(longer))
        assert longer.fits(large.memory_limit)
        ends.append(longer.makespan / longer.bound)
    assert ends == sorted(ends)
    if name == "fused-v":
        assert ends[0] <= found.makespan / found.bound + 0.06


def test_a_search_that_has_little_time_ends_nearer_to_the_bound(monkeypatch):
    large = problem(16, 32)
    found = find(large, family_of("fused-v"), nothing())
    check_steps(large, steps(found))
    monkeypatch.setattr(scaling, "SMALL", 16)
    without = find(large, family_of("fused-v"), nothing())
    assert found.makespan - found.bound < 0.8 * (without.makespan - without.bound)


def test_a_rank_of_the_small_problem_takes_the_mean_of_those_it_stands_for():
    rng = np.random.default_rng(0)
    shape = (1, 16, 8)
    f, b, a = (rng.random(shape) + 1 for _ in range(3))
    models = tuple(ModelPipelines(name, 16, 8, f, b, a) for name in ("actor", "critic"))
    small = fewer_ranks(ScheduleProblem(models, 0.5), family_of("fused"))
    assert small.ranks == 8
    assert np.allclose(small.array(0, "forward")[3, 1], f[0, 6:8, 2:4].mean())
    assert np.allclose(small.latencies, 0.5)


@pytest.mark.parametrize(
    ("stages", "count"),
    [(8, 64), (17, 34), (16, 63)],
    ids=["few ranks already", "a prime number of ranks", "micro-batches that cannot be divided"],
)
def test_other_problems_are_searched_as_they_are(stages, count):
    assert fewer_ranks(fused_problem(stages, stages, count, 1, 1), family_of("fused")) is None
    assert fewer_ranks(fused_problem(16, 16, 64, 1, 1), family_of("zb-v")) is None, "built by a rule"
