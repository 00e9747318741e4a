"""Dispatch rules for schedules of many ranks."""

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
from dovetail.pipelines.search import find as find_module
from dovetail.pipelines.search import scaling
from dovetail.pipelines.search.dispatch_rules import DispatchSearch

NAMES = ["fused", "fused-split", "shared", "fused-v", "fused-v-whole", "fused-w", "v-half"]


def rules(instance, rounds, workers=1, seed=0):
    search = DispatchSearch(instance, seed)
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(rounds):
            search.round(pool)
    return search


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(NAMES), st.sampled_from([None, 1.0, 1.3, 2.0]))
def test_what_a_rule_lists_runs_within_the_limit_and_no_later_than_it_says(problem, name, slack):
    family = family_of(name)
    limit = None if slack is None else problem.least_memory_of(family.chunks) * slack
    problem = replace(problem, mini_batches=1, memory_limit=limit) if problem.mini_batches == 1 else None
    if problem is None:
        return
    instance = family_instance(problem, family)
    search = rules(instance, 3)
    if search.best is None:
        return  # sizes that differ by micro-batch may leave no room
    found = evaluate(instance, search.best, name)
    check_steps(problem, steps(found))
    # A rule may hold micro-batches back; whoever runs the orders does not wait.
    assert found.makespan <= search.makespan * (1 + 1e-9)
    assert found.fits(limit)
    assert found.makespan >= lower_bound(instance) - 1e-9


@pytest.mark.parametrize("name", ["fused-split", "fused-v", "fused-w"])
def test_no_deadlock_where_only_one_micro_batch_fits(name):
    """A list scheduler that fills the memory with the first chunk could never start the second."""
    free = fused_problem(8, 4, 12, 2, 0.5, communication=0.1)
    limit = free.least_memory_of(family_of(name).chunks) * 1.6
    problem = replace(free, memory_limit=limit)
    search = rules(family_instance(problem, family_of(name)), 1)
    assert len(search._kept) >= 4
    assert evaluate(search.instance, search.best).fits(limit)


def test_the_rules_depend_on_the_seed_and_not_on_the_number_of_threads():
    instance = family_instance(
        fused_problem(8, 4, 16, 2, 0.5, communication=0.1, memory_limit=10.0), family_of("fused-v")
    )
    one, two, other = rules(instance, 12), rules(instance, 12, workers=3), rules(instance, 12, seed=1)
    assert (one.best == two.best).all()
    assert one.makespan == two.makespan
    assert not np.array_equal(one.best, other.best)


def test_more_rounds_are_never_worse_and_shorten_the_schedule():
    instance = family_instance(
        fused_problem(16, 8, 64, 2, 0.5, communication=0.1, memory_limit=24.0), family_of("fused-v")
    )
    few, many = rules(instance, 2), rules(instance, 30)
    assert many.makespan < few.makespan


@pytest.mark.slow
@pytest.mark.parametrize(("share", "within"), [(0.35, 1.12), (0.7, 1.08)])
def test_many_ranks_are_near_the_bound(share, within):
    """The problem of `make bench-scale`, a quarter of it: 16 ranks, 64 micro-batches, scarce memory."""
    free = fused_problem(16, 8, 64, 22.6, 2.57, actor_activation=2.0, critic_activation=0.4, communication=1.36)
    instance = family_instance(replace(free, memory_limit=share * 32.0), family_of("fused-v"))
    assert rules(instance, 60).makespan <= lower_bound(instance) * within


@pytest.mark.slow
def test_a_search_of_many_ranks_begins_with_the_best_rule(monkeypatch):
    monkeypatch.setattr(scaling, "SMALL", 8)
    monkeypatch.setattr(find_module, "LARGE", 100)
    free = fused_problem(16, 8, 64, 22.6, 2.57, actor_activation=2.0, critic_activation=0.4, communication=1.36)
    problem = replace(free, memory_limit=16.0)
    effort = SearchEffort(seconds=0, clock=itertools.count().__next__, scale=0.1, memory=False, exact=False)
    found = find(problem, family_of("fused-v"), effort)
    check_steps(problem, steps(found))
    assert found.how == "dispatch"
    assert found.makespan == pytest.approx(rules(found.instance, 1).makespan)
