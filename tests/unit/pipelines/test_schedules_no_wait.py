"""Schedules of many ranks and scarce memory, whose larger model never waits on its way."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedules_search import problems

from dovetail.pipelines import (
    SearchEffort,
    check_steps,
    evaluate,
    family_instance,
    family_of,
    find,
    fused_problem,
    lower_bound,
    steps,
)
from dovetail.pipelines.compat import COMPILED
from dovetail.pipelines.search import find as find_module
from dovetail.pipelines.search import rounds, scaling
from dovetail.pipelines.search.dispatch_rules import DispatchSearch
from dovetail.pipelines.search.no_wait import no_wait

pytestmark = pytest.mark.skipif(not COMPILED, reason="needs numba")

NAMES = ["fused-split", "fused-v", "shared-v", "fused-w", "v-half"]


def bench(ranks, count, limit):
    """The problem of `make bench-scale`, with any number of ranks."""
    sizes = {"actor_activation": 2.0356, "critic_activation": 0.4113}
    free = fused_problem(ranks, ranks // 2, count, 22.577, 2.57, communication=1.362, **sizes)
    return family_instance(replace(free, memory_limit=limit), family_of("fused-v"))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(NAMES), st.sampled_from([1.0, 1.3, 2.0, 3.0]))
def test_what_it_lists_runs_within_the_limit(problem, name, slack):
    """Times and sizes that differ by stage and micro-batch, several pipelines of either model."""
    family = family_of(name)
    if problem.mini_batches > 1:
        return
    problem = replace(problem, memory_limit=problem.least_memory_of(family.chunks) * slack)
    instance = family_instance(problem, family)
    orders = no_wait(instance, lambda: 1.0)
    if orders is None:
        return
    found = evaluate(instance, orders, name)
    check_steps(problem, steps(found))
    assert found.fits(problem.memory_limit)
    assert found.makespan >= lower_bound(instance) - 1e-9


@pytest.mark.parametrize(("name", "limit"), [("fused-split", 4.0), ("fused-v", 2.5), ("fused-w", 2.5)])
def test_it_finds_schedules_of_any_number_of_chunks(name, limit):
    free = fused_problem(8, 4, 32, 4.0, 0.5, actor_activation=1.0, critic_activation=0.2, communication=0.5)
    instance = family_instance(replace(free, memory_limit=limit), family_of(name))
    found = evaluate(instance, no_wait(instance, lambda: 1.0))
    assert found.fits(limit)
    dispatched = DispatchSearch(instance, 0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            dispatched.round(pool)
    assert found.makespan < dispatched.makespan


def test_micro_batches_of_the_larger_model_do_not_wait():
    instance = bench(16, 64, 10.0)
    found = evaluate(instance, no_wait(instance, lambda: 1.0))
    way = found.finish[0, 1, 0, :64] - found.finish[0, 0, 0, :64]
    least = 31 * 2 * 11.2885 + 11.2885 + 30 * 2 * 1.362
    assert (way <= least * 1.05).all()
    assert (way >= least * (1 - 1e-9)).all()


@pytest.mark.slow
def test_64_ranks_with_40_gb_are_within_3_percent_at_once():
    instance = bench(64, 256, 40.0)
    found = evaluate(instance, no_wait(instance, lambda: 0.0))
    check_steps(instance.problem, steps(found))
    assert found.fits(40.0)
    assert found.makespan <= found.bound * 1.03


def test_there_is_none_where_memory_is_not_scarce():
    assert no_wait(bench(16, 64, 40.0), lambda: 1.0) is None
    assert no_wait(bench(16, 64, None), lambda: 1.0) is None


def test_a_search_of_many_ranks_takes_it_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(scaling, "SMALL", 8)
    monkeypatch.setattr(find_module, "LARGE", 100)
    problem = bench(16, 64, 10.0).problem
    effort = SearchEffort(seconds=0, clock=itertools.count().__next__, scale=0.1, memory=False, exact=False)
    found = find(problem, family_of("fused-v"), effort)
    assert found.how == "no wait"
    assert found.makespan <= found.bound * 1.12
    assert np.array_equal(found.orders, no_wait(found.instance, lambda: 0.0))


@pytest.mark.parametrize("large", [True, False])
def test_a_long_round_does_not_begin_when_the_time_is_up(monkeypatch, large):
    """But a short one does: otherwise a search with little time would try nothing."""
    monkeypatch.setattr(scaling, "SMALL", 8)
    monkeypatch.setattr(rounds, "LARGE", 100 if large else 40_000)
    done = []

    def progress(what, makespan, peak):
        done.append(what)

    effort = SearchEffort(0, itertools.count().__next__, scale=0.1, memory=False, exact=False, progress=progress)
    find(bench(16, 64, 10.0).problem, family_of("fused-v"), effort)
    assert bool(done) != large
