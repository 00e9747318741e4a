"""Each model on ranks of its own, beside the families that share them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.pipelines import (
    FAMILIES,
    ModelPipelines,
    ProblemError,
    ScheduleError,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    choose,
    dedicated,
    dedicated_schedule,
    document,
    find,
    fused_problem,
    steps,
)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3))
def test_equal_models_take_half_the_ranks_each_and_the_time_of_one_pipeline_there(
    half: int, count: int, mini: int
) -> None:
    whole = dedicated(fused_problem(2 * half, 2 * half, count, 1, 1, mini_batches=mini))
    assert [list(m.ranks) for m in whole.instance.problem.models] == [
        list(range(half)),
        list(range(half, 2 * half)),
    ]
    # Stages of half as many ranks are twice as long and as large.
    alone = find(fused_problem(half, half, count, 2, 2, mini_batches=mini), FAMILIES["serial"], SearchEffort())
    assert whole.makespan == pytest.approx(alone.makespan / 2)
    assert whole.peak == pytest.approx(2 * alone.peak)
    assert whole.bound <= whole.makespan * (1 + 1e-9)


@st.composite
def dedicated_problems(draw: st.DrawFn) -> ScheduleProblem:
    """Unlike models on ranks of their own, every pass of another length."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mini, first, models = draw(st.integers(1, 3)), 0, []
    for name in ("actor", "critic"):
        stages, pipelines, count = (draw(st.integers(1, 3)) for _ in range(3))
        times = rng.uniform(1, 3, (pipelines, stages, count * mini))
        models.append(
            ModelPipelines(name, stages, count, times, 2 * times, times, pipelines, optimizer_step=0.5, first=first)
        )
        first += stages * pipelines
    return ScheduleProblem((models[0], models[1]), 0.25, mini)


@settings(deadline=None, max_examples=60)
@given(dedicated_problems(), st.integers(0, 2**32))
def test_lists_are_legal_and_last_as_long_as_the_slower_model(problem: ScheduleProblem, seed: int) -> None:
    found = dedicated_schedule(problem)
    lists = steps(found)
    check_steps(problem, lists)
    for rank, mine in enumerate(lists):
        held = "actor" if rank in problem.models[0].ranks else "critic"
        assert {step.model for step in mine} == {held}
    ends = {m.name: max(p.end for p in found.passes() if p.model == m.name) for m in problem.models}
    assert found.makespan == pytest.approx(max(ends.values()))
    rng = random.Random(seed)
    rank = rng.choice([r for r, mine in enumerate(lists) if mine])
    lists[rank].insert(0, lists[rank].pop())
    with pytest.raises(ScheduleError):
        check_steps(problem, lists)


def test_neither_model_waits_for_the_other() -> None:
    """Halving the critic's times changes nothing of the actor's."""

    def problem(critic: float) -> ScheduleProblem:
        return ScheduleProblem(
            (ModelPipelines("actor", 2, 4, 1.0, 2.0), ModelPipelines("critic", 2, 4, critic, 2 * critic, first=2)),
            0.1,
            2,
        )

    slow, fast = ([p for p in dedicated_schedule(problem(t)).passes() if p.model == "actor"] for t in (1.0, 0.5))
    assert slow == fast


def test_the_larger_model_gets_more_ranks_and_the_choice_says_what_sharing_gains() -> None:
    problem = fused_problem(8, 8, 8, 5, 2)
    choice = choose(
        problem, SearchEffort(seconds=5, scale=0.1, workers=1), ["serial", "stitched", "fused", "dedicated"]
    )
    own = choice.schedules["dedicated"]
    assert [len(m.ranks) for m in own.instance.problem.models] == [6, 2]
    assert choice.best.makespan < own.makespan < choice.schedules["serial"].makespan
    assert choice.loss("dedicated") == pytest.approx(own.makespan / choice.best.makespan - 1)


def test_memory_limits_the_division() -> None:
    problem = fused_problem(4, 4, 8, 2, 1)
    needed = dedicated(problem).peak
    assert dedicated(ScheduleProblem(problem.models, memory_limit=needed)).peak == needed
    with pytest.raises(ProblemError, match="actor and critic do not fit on ranks of their own: 4 ranks, each with 1"):
        dedicated(ScheduleProblem(problem.models, memory_limit=problem.least_memory))


def test_models_on_some_common_ranks_are_refused() -> None:
    with pytest.raises(ProblemError, match="do not occupy the same ranks"):
        ScheduleProblem((ModelPipelines("actor", 2, 4, 1.0, 2.0), ModelPipelines("critic", 2, 4, 1.0, 2.0, first=1)))


def test_it_is_written_like_the_others() -> None:
    found = dedicated(fused_problem(4, 4, 3, 2, 1))
    written = json.loads(json.dumps(document(found)))
    actor, critic = written["models"]
    assert (written["ranks"], actor["stages"], critic["first_rank"], critic["stages"]) == (4, 3, 3, 1)
    assert [{a["model"] for a in mine} for mine in written["actions"]] == [{"actor"}] * 3 + [{"critic"}]
