"""Each model on ranks of its own, beside the families that share them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.planner.schedules.choose import choose
from dovetail.planner.schedules.dedicated import dedicated
from dovetail.planner.schedules.families import FAMILIES
from dovetail.planner.schedules.problem import Problem, fused_problem
from dovetail.planner.schedules.search import Effort, find


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3))
def test_equal_models_take_half_the_ranks_each_and_the_time_of_one_pipeline_there(
    half: int, count: int, mini: int
) -> None:
    whole = dedicated(fused_problem(2 * half, 2 * half, count, 1, 1, mini_batches=mini))
    assert whole is not None
    assert whole.ranks == (half, half)
    # Stages of half as many ranks are twice as long and as large.
    alone = find(fused_problem(half, half, count, 2, 2, mini_batches=mini), FAMILIES["serial"], Effort())
    assert whole.makespan == pytest.approx(alone.makespan / 2)
    assert whole.peak == pytest.approx(2 * alone.peak)


def test_the_larger_model_gets_more_ranks_and_the_choice_says_what_sharing_gains() -> None:
    problem = fused_problem(8, 8, 8, 5, 2)
    choice = choose(problem, Effort(seconds=5, scale=0.1, workers=1), ["serial", "stitched", "fused"])
    assert choice.dedicated is not None
    assert choice.dedicated.ranks == (6, 2)
    assert choice.best.makespan < choice.dedicated.makespan < choice.schedules["serial"].makespan


def test_memory_limits_the_division() -> None:
    problem = fused_problem(4, 4, 8, 2, 1)
    free = dedicated(problem)
    assert free is not None
    assert dedicated(Problem(problem.models, memory_limit=free.peak * 0.99)) != free
    assert dedicated(Problem(problem.models, memory_limit=problem.least_memory)) is None
