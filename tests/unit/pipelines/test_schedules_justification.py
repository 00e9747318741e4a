"""Forward-backward improvement of fused schedules, and the mirror image in time that it needs."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.pipelines import (
    FAMILIES,
    Family,
    ModelPipelines,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    evaluate,
    family_instance,
    fixed_orders,
    fused_problem,
    serial_memory,
    steps,
)
from dovetail.pipelines.instance import mirror, unmirror
from dovetail.pipelines.search.rounds import Rounds

QUICK = SearchEffort(scale=0.01, workers=1, memory=False)
SEARCHED = ["fused", "fused-rolled", "fused-split", "fused-split-rolled", "shared"]


@st.composite
def problems(draw):
    """Times and sizes that differ by model, pipeline, stage and micro-batch; optimizer steps of one length."""
    ranks, k = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]))
    count, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def model(name, pipelines, m):
        shape = (pipelines, ranks // pipelines, m * count)
        f, b, a = (rng.integers(1, 6, shape).astype(float) for _ in range(3))
        return ModelPipelines(name, ranks // pipelines, m, f, b, a, pipelines, optimizer_step=2.0)

    latency = rng.integers(0, 3, (ranks, ranks)).astype(float)
    return ScheduleProblem((model("actor", 1, k * each), model("critic", k, each)), latency, count)


def plain(problem, name):
    """One model's 1F1B after the other's."""
    instance = family_instance(problem, FAMILIES[name])
    return evaluate(instance, fixed_orders(instance, Family("serial", "", instance.coupling)), name)


@settings(max_examples=25, deadline=None)
@given(problems(), st.sampled_from(SEARCHED))
def test_justified_schedules_are_faster_legal_and_within_the_memory_of_their_start(problem, name):
    start = plain(problem, name)
    limited = replace(problem, memory_limit=start.peak)
    with ThreadPoolExecutor(1) as pool:
        rounds = Rounds(family_instance(limited, FAMILIES[name]), FAMILIES[name], QUICK, pool)
        found = rounds.justify([start], start.peak, rounds.bound, 1.0)
    for schedule in found:
        assert schedule.makespan < start.makespan
        assert schedule.makespan >= rounds.bound * (1 - 1e-9)
        assert schedule.peak <= start.peak * (1 + 1e-9)
        check_steps(limited, steps(schedule))


@settings(max_examples=25, deadline=None)
@given(problems(), st.sampled_from(SEARCHED))
def test_the_mirror_image_of_the_mirror_image_is_the_instance(problem, name):
    instance = family_instance(problem, FAMILIES[name])
    twice = mirror(mirror(instance))
    for field in ("duration", "activation", "latency"):
        assert (getattr(twice, field) == getattr(instance, field)).all()
    orders = plain(problem, name).orders
    assert (unmirror(instance, unmirror(instance, orders)) == orders).all()


@pytest.mark.slow
def test_justification_fills_bubbles_that_rules_leave():
    problem = fused_problem(8, 8, 16, 5, 2, critic_activation=0.5)
    family, limit = FAMILIES["fused-split"], serial_memory(problem)
    with ThreadPoolExecutor(1) as pool:
        rounds = Rounds(family_instance(problem, family), family, SearchEffort(scale=0.1, workers=1), pool)
        rules = rounds.rules(limit, rounds.bound, 0.1)
        best = min(s.makespan for s in rules)
        found = rounds.justify(rules, limit, rounds.bound, 1.0)
    assert found
    assert min(s.makespan for s in found) < 0.99 * best
    assert max(s.peak for s in found) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("workers", [2, 4])
def test_justification_does_not_depend_on_the_number_of_threads(workers):
    problem = fused_problem(4, 4, 8, 5, 2)
    family, start = FAMILIES["fused-split"], plain(problem, "fused-split")
    orders = []
    for count in (1, workers):
        with ThreadPoolExecutor(count) as pool:
            rounds = Rounds(start.instance, family, replace(QUICK, workers=count, seed=5), pool)
            orders.append([s.orders for s in rounds.justify([start], 4.0, rounds.bound, 1.0)])
    assert len(orders[0]) == len(orders[1]) > 0
    assert all((a == b).all() for a, b in zip(*orders, strict=True))
