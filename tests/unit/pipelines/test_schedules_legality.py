"""The validator of fused schedules: what it accepts runs to its end whatever the times; what it refuses does not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.pipelines import (
    CHUNKED,
    FAMILIES,
    ModelPipelines,
    RankPass,
    ScheduleError,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    family_of,
    find,
    fused_problem,
    steps,
)

QUICK = SearchEffort(scale=0.01, workers=1, memory=False)


@st.composite
def small(draw):
    ranks = draw(st.sampled_from([1, 2, 4]))
    k = draw(st.sampled_from([k for k in (1, 2) if ranks % k == 0]))
    count = k * draw(st.integers(1, 2))
    models = (
        ModelPipelines("actor", ranks, count, 2.0, 4.0),
        ModelPipelines("critic", ranks // k, count // k, 1.0, 2.0, pipelines=k),
    )
    return ScheduleProblem(models, mini_batches=draw(st.integers(1, 2)))


def simulate(problem, lists, rng):
    """A run with random durations and message times, one channel a model, pipeline, edge and direction, first in first
    out, receivers taking what the channel delivers; returns the passes in order of their ends, or None if it hangs.
    Written apart from the validator."""
    groups = {m.name: m.micro_batches for m in problem.models}
    stages = {m.name: 1 + max(s.stage for mine in lists for s in mine if s.model == m.name) for m in problem.models}
    copies = {m.name: m.pipelines for m in problem.models}
    place, clock, ended = [0] * len(lists), [0.0] * len(lists), {}
    channels = {}
    while True:
        moved = False
        for rank in rng.sample(range(len(lists)), len(lists)):
            if place[rank] == len(lists[rank]):
                continue
            step = lists[rank][place[rank]]
            inbox = None
            if step.kind == "F" and step.stage:
                inbox = channels.setdefault((step.model, step.pipeline, step.stage - 1, "down"), [])
            if step.kind in "BI" and step.stage + 1 < stages[step.model]:
                inbox = channels.setdefault((step.model, step.pipeline, step.stage + 1, "up"), [])
            if inbox is not None and not inbox:
                continue
            if step.kind in "BI" and (*step[:4], "F") not in ended:
                continue
            if step.kind == "W" and (*step[:4], "I") not in ended:
                continue
            block = step.micro_batch // groups[step.model]
            finals = sum(
                key[0] == step.model and key[3] // groups[step.model] < block and key[4] in "BW" for key in ended
            )
            if step.kind == "F" and finals < block * groups[step.model] * stages[step.model] * copies[step.model]:
                continue
            arrival = 0.0
            if inbox is not None:
                number, arrival = inbox.pop(0)
                assert number == step.micro_batch, "a receiver took another micro-batch's tensor"
            clock[rank] = max(clock[rank], arrival) + rng.expovariate(1)
            ended[tuple(step)] = clock[rank]
            if step.kind == "F":
                out = channels.setdefault((step.model, step.pipeline, step.stage, "down"), [])
                out.append((step.micro_batch, clock[rank] + rng.expovariate(1)))
            elif step.kind in "BI":
                out = channels.setdefault((step.model, step.pipeline, step.stage, "up"), [])
                out.append((step.micro_batch, clock[rank] + rng.expovariate(1)))
            place[rank] += 1
            moved = True
        if not moved:
            break
    return ended if all(p == len(mine) for p, mine in zip(place, lists, strict=True)) else None


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(small(), st.sampled_from(sorted([*FAMILIES, *CHUNKED])), st.integers(0, 2**32))
def test_accepted_lists_never_deadlock_whatever_the_times(problem, name, seed):
    lists = steps(find(problem, family_of(name), QUICK))
    check_steps(problem, lists)
    assert simulate(problem, lists, random.Random(seed)) is not None


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(small(), st.sampled_from(["fused", "shared-rolled", "fused-split", "serial"]), st.integers(0, 2**32))
def test_shuffled_lists_are_accepted_exactly_if_they_run(problem, name, seed):
    """Some passes moved at random: the validator and the simulator agree on which lists run to their end."""
    rng = random.Random(seed)
    lists = steps(find(problem, family_of(name), QUICK))
    for _ in range(rng.randint(1, 3)):
        mine = rng.choice(lists)
        mine.insert(rng.randrange(len(mine)), mine.pop(rng.randrange(len(mine))))
    try:
        check_steps(problem, lists)
    except ScheduleError as error:
        message = str(error)
        if "disagree on the order" in message:
            return  # would deliver a tensor to the wrong pass, or hang
        assert "deadlocks" in message
        assert simulate(problem, lists, rng) is None
    else:
        assert simulate(problem, lists, rng) is not None


@pytest.fixture
def lists():
    problem = fused_problem(2, 2, 2, 2, 1)
    return problem, steps(find(problem, FAMILIES["fused"], QUICK))


def test_a_missing_pass_is_named(lists):
    problem, mine = lists
    mine[0] = [s for s in mine[0] if s != RankPass("actor", 0, 0, 1, "B")]
    with pytest.raises(ScheduleError, match=r"actor's micro-batch 1 lacks B \(or I and W\) in stage 0 of pipeline 0"):
        check_steps(problem, mine)


def test_a_pass_run_twice_is_named(lists):
    problem, mine = lists
    mine[0].append(mine[0][0])
    with pytest.raises(ScheduleError, match="which rank 0 runs too"):
        check_steps(problem, mine)


def test_a_pass_that_does_not_exist_is_named(lists):
    problem, mine = lists
    mine[1].append(RankPass("critic", 0, 0, 9, "F"))
    with pytest.raises(ScheduleError, match=r"rank 1 runs F of critic's micro-batch 9 .* not part of the problem"):
        check_steps(problem, mine)


def test_a_stage_on_two_ranks_is_refused(lists):
    problem, mine = lists
    step = RankPass("actor", 0, 0, 1, "F")
    mine[0].remove(step)
    mine[1].insert(0, step)
    with pytest.raises(ScheduleError, match="ranks 0 and 1 both run stage 0 of actor's pipeline 0"):
        check_steps(problem, mine)


def test_a_cycle_is_refused(lists):
    problem, mine = lists
    actor = RankPass("actor", 0, 0, 0, "F")
    mine[0].remove(actor)
    mine[0].append(actor)
    with pytest.raises(ScheduleError, match=r"disagree|deadlocks"):
        check_steps(problem, mine)


def test_memory_above_the_limit_is_refused():
    free = fused_problem(4, 4, 4, 2, 1)
    found = find(free, FAMILIES["serial"], QUICK)
    assert found.peak == 4
    tight = fused_problem(4, 4, 4, 2, 1, memory_limit=3.0)
    with pytest.raises(
        ScheduleError, match=r"rank 0 holds 4 of activations at F of actor's micro-batch 3 .* limit is 3"
    ):
        check_steps(tight, steps(found))
