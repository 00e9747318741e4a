"""The lower bound that knows of the limit of memory, against exact answers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedules_search import exhaustive

from dovetail.pipelines import (
    ModelPipelines,
    ScheduleProblem,
    SearchEffort,
    Shape,
    evaluate,
    family_instance,
    family_of,
    find,
    fixed_orders,
    fused_problem,
    lower_bound,
)
from dovetail.pipelines.families import Family
from dovetail.pipelines.search.exact import ExactSearch, available

NAMES = ["fused", "fused-rolled", "fused-split", "shared", "zero-bubble", "fused-v", "fused-v-whole", "fused-w"]
NAMES += ["interleaved", "interleaved-4"]


@st.composite
def limited(draw):
    """A small problem whose times and sizes differ, and a family; the limit is between the least and the largest."""
    ranks, k = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    count, each = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def model(name, pipelines, m):
        shape = (pipelines, ranks // pipelines * 4, m * count)
        f, b = (rng.integers(1, 5, shape).astype(float) for _ in range(2))
        a = rng.integers(0, 4, shape).astype(float)
        step = float(rng.integers(0, 3))
        return ModelPipelines(name, ranks // pipelines, m, f, 2 * b, a, pipelines, optimizer_step=step, parts=4)

    latency = rng.integers(0, 3, (ranks, ranks)).astype(float)
    problem = ScheduleProblem((model("actor", 1, k * each), model("critic", k, each)), latency, count)
    name = draw(st.sampled_from([n for n in NAMES if count > 1 or not n.endswith("-rolled")]))
    family = family_of(name)
    least = problem.least_memory_of(family.chunks, family.shape is Shape.LOOP)
    most = sum(float(problem.array(m, "activation").sum(axis=1).max()) for m in (0, 1))
    limit = least + draw(st.sampled_from([0.0, 0.1, 0.3, 0.6])) * (most - least)
    return replace(problem, memory_limit=max(np.ceil(limit), 1.0)), family


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="needs OR-Tools")
@settings(max_examples=60, deadline=None)
@given(limited(), st.booleans())
def test_nothing_is_faster_than_the_bound(drawn, is_limited):
    problem, family = drawn
    free = replace(problem, memory_limit=None)
    problem = problem if is_limited else free
    instance = family_instance(problem, family)
    bound = lower_bound(instance)
    answer = ExactSearch(instance, np.ceil(bound) - 1, problem.memory_limit).run(1, 0)
    assert answer.orders is None
    assert bound >= lower_bound(family_instance(free, family)) - 1e-9


@settings(max_examples=40, deadline=None)
@given(limited())
def test_one_micro_batch_after_the_other_is_no_faster(drawn):
    problem, family = drawn
    if family.name == "zero-bubble":
        return  # one model after the other
    instance = family_instance(problem, family)
    orders = fixed_orders(instance, Family("one by one", "", instance.coupling))
    found = evaluate(instance, orders)
    if found.fits(problem.memory_limit):
        assert found.makespan >= lower_bound(instance) - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "room", "within"),
    [("fused", 1, 1.01), ("fused-split", 1, 1.01), ("fused-split", 2, 1.15), ("fused-v", 1, 1.3)],
)
def test_it_is_nearly_reached_where_micro_batches_wait_for_memory(name, room, within):
    """The critic is so small that only the actor's memory counts."""
    models = (
        ModelPipelines("actor", 4, 4 * room, 4.0, 8.0, 4.0),
        ModelPipelines("critic", 4, 1, 0.25, 0.5, 0.0),
    )
    problem = ScheduleProblem(models, 0.0, memory_limit=4.0 * room)
    instance = family_instance(problem, family_of(name))
    bound = lower_bound(instance)
    # The actor's micro-batches run down the pipeline and back four times, `room` at once.
    assert bound > lower_bound(family_instance(replace(problem, memory_limit=None), family_of(name))) * 1.1
    found = find(problem, family_of(name), SearchEffort(scale=0.1, memory=False, exact=False))
    assert found.makespan <= bound * within


@pytest.mark.parametrize("name", ["fused", "fused-split", "fused-v", "fused-v-whole"])
@pytest.mark.parametrize(("count", "room", "latency"), [(4, 2, 8.0), (6, 3, 16.0)])
def test_it_is_reached_where_turns_wait_for_the_work_of_a_rank(name, count, room, latency):
    """`room` micro-batches of the actor fit at once. Those of the second turn enter one by one, each after the backward
    of one of the first."""
    models = (ModelPipelines("actor", 2, count, 4.0, 8.0, 4.0), ModelPipelines("critic", 2, 1, 1.0, 2.0, 0.0))
    problem = ScheduleProblem(models, latency, memory_limit=4.0 * room)
    found = find(problem, family_of(name), SearchEffort(scale=0.1, memory=False, exact=False))
    assert found.makespan == pytest.approx(lower_bound(found.instance))


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (fused_problem(4, 4, 1, 1, 1), "fused-v"),
        (fused_problem(8, 8, 4, 10, 1), "fused-split"),
        (fused_problem(4, 2, 2, 17.5, 2.3, communication=0.5), "fused-v"),
    ],
)
def test_it_is_reached_where_a_few_micro_batches_of_a_large_model_go_all_the_way(problem, name):
    """With or without a limit of memory: the last one enters after the others, and then goes there and back."""
    found = find(problem, family_of(name), SearchEffort(scale=0.02, memory=False, exact=False))
    assert found.makespan == pytest.approx(lower_bound(found.instance))


@pytest.mark.parametrize(("limit", "share"), [(1.0, 0.95), (2.0, 0.7)])
def test_the_best_of_all_orders_is_no_faster(limit, share):
    actor = ModelPipelines("actor", 2, 2, np.array([[[1.0], [2.0]]]), 2.0)
    critic = ModelPipelines("critic", 2, 1, 2.0, np.array([[[2.0], [4.0]]]))
    instance = family_instance(ScheduleProblem((actor, critic), 1.0, memory_limit=limit), family_of("fused"))
    best = exhaustive(instance, lambda found: found.fits(limit))
    assert best * share <= lower_bound(instance) <= best


@pytest.mark.slow
def test_64_ranks_with_40_gb():
    """The problem of `make bench-scale`: a rank at the turn of the V has room for 39 stages, so for 19 micro-batches of
    the actor. 256 of them come in 14 turns."""
    free = fused_problem(64, 32, 256, 2.0, 0.5, actor_activation=2.0, critic_activation=0.4)
    bounds = {
        limit: lower_bound(family_instance(replace(free, memory_limit=limit), family_of("fused-v")))
        for limit in (None, 80.0, 39.9)
    }
    assert bounds[None] == bounds[80.0]
    # Down to the turn 64 passes of half a stage, 12 turns of there and back with a weight gradient, and the way to the
    # first B of the next turn. From there to the last of 28 micro-batches 17 stages leave and 16 enter. Then its way
    # back to the turn, its way to the end and a weight gradient.
    assert bounds[39.9] == pytest.approx(64 + 12 * 129 + 127 + 17 * 2 + 16 + 128 + 64 + 1)
    assert bounds[39.9] > bounds[None]
