"""CP-SAT on schedules."""

import itertools
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedules_search import exhaustive, problems

from dovetail.pipelines import (
    FAMILIES,
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
from dovetail.pipelines.search.exact import ExactSearch, time_unit

pytestmark = pytest.mark.skipif(find_spec("ortools") is None, reason="needs OR-Tools")


@pytest.mark.parametrize("name", ["fused", "shared"])
@pytest.mark.parametrize("seed", range(2))
def test_it_finds_the_optimum_and_proves_that_nothing_is_faster(name, seed):
    rng = np.random.default_rng(seed)

    def model(label, m):
        f, b = (rng.integers(1, 6, (1, 2, m)).astype(float) for _ in range(2))
        return ModelPipelines(label, 2, m, f, b)

    edges = rng.integers(0, 3, (2, 2)).astype(float)
    instance = family_instance(ScheduleProblem((model("actor", 2), model("critic", 1)), edges), FAMILIES[name])
    best = exhaustive(instance)
    found = ExactSearch(instance, best, None).run(10, 0)
    assert evaluate(instance, found.orders).makespan == best
    assert not found.impossible
    none = ExactSearch(instance, best - 1, None).run(10, 0)
    assert none.orders is None
    assert none.impossible


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    problems(), st.sampled_from(["fused", "fused-rolled", "fused-split-rolled", "zero-bubble", "fused-v"]), st.data()
)
def test_what_it_finds_holds(problem, name, data):
    instance = family_instance(problem, family_of(name))
    known = find(problem, family_of(name), SearchEffort(scale=0.003, workers=1, memory=False, exact=False))
    limit = data.draw(st.sampled_from([None, known.peak]))
    answer = ExactSearch(instance, known.makespan, limit).run(2, 0)
    assert not answer.impossible, "the other searches found one"
    if answer.orders is not None:
        found = evaluate(instance, answer.orders, name)
        check_steps(problem, steps(found))
        assert found.makespan <= known.makespan
        assert limit is None or found.peak <= limit


def test_times_without_a_common_unit_are_searched_but_nothing_is_proved():
    problem = fused_problem(2, 2, 2, np.pi, np.e)
    instance = family_instance(problem, FAMILIES["fused"])
    assert time_unit(instance) is None
    known = find(problem, FAMILIES["fused"], SearchEffort(scale=0.003, exact=False)).makespan
    answer = ExactSearch(instance, known * 1.001, None).run(5, 0)
    assert evaluate(instance, answer.orders).makespan <= known * 1.001
    assert not ExactSearch(instance, known / 2, None).run(5, 0).impossible


def test_what_is_proved_becomes_the_bound():
    """Two stages, two micro-batches each way: the arithmetic bound cannot be met."""
    for forward, count in itertools.product(((1, 1), (2, 1), (3, 2)), (1, 2)):
        problem = fused_problem(2, 2, count, *forward, memory_limit=2 * max(forward))
        found = find(problem, FAMILIES["fused"], SearchEffort(scale=0.1, memory=False))
        assert found.at_bound
        assert found.bound == found.makespan


def test_a_row_of_the_papers_table_that_the_other_searches_miss():
    """33B/13B 8/4 MB8 at the bound and at serial memory."""
    problem = fused_problem(8, 4, 8, 5, 2, critic_activation=40 * 5120 / (60 * 6656))
    instance = family_instance(problem, FAMILIES["fused"])
    answer = ExactSearch(instance, 225, serial_memory(problem) * 1.0045).run(5, 0)
    found = evaluate(instance, answer.orders)
    assert found.makespan == 225
    assert found.peak <= serial_memory(problem) * 1.0045
