"""How often a status is written."""

import pytest

from dovetail.operator.reconcile import reasons
from dovetail.operator.status_rate import (
    LONGEST_SECONDS,
    READY_SECONDS,
    STARTING_SECONDS,
    STARTS_AT_ONCE,
    STATUS_SECONDS,
    StatusRate,
)

KEY = ("team-a", "demo")


def status(reason, kind="Running", generation=1, **more):
    found = {"type": kind, "status": str(reason == reasons.ALL_READY), "reason": reason, "message": "3 of 4"}
    return {"observedGeneration": generation, "conditions": [found], **more}


STARTING = status(reasons.STARTING)


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def rate(clock):
    made = StatusRate(lambda: clock[0])
    made.wrote(KEY)
    return made


def test_pods_that_start_wait_for_their_turn(rate, clock):
    assert rate.wait(KEY, STARTING, status(reasons.ALL_READY)) == STATUS_SECONDS
    assert rate.wait(KEY, STARTING, status(reasons.STARTING, groups=[])) == STARTING_SECONDS
    clock[0] += STATUS_SECONDS
    assert rate.wait(KEY, STARTING, status(reasons.ALL_READY)) == 0
    assert rate.wait(KEY, status(reasons.ALL_READY), status(reasons.ALL_READY, iteration=3)) == 0
    assert rate.wait(KEY, STARTING, status(reasons.STARTING, groups=[])) == STARTING_SECONDS - STATUS_SECONDS


def test_a_new_job_that_starts_well_has_no_status_for_a_moment(clock):
    rate = StatusRate(lambda: clock[0])
    assert rate.wait(KEY, {}, STARTING) == STATUS_SECONDS
    clock[0] += STATUS_SECONDS
    assert rate.wait(KEY, {}, STARTING) == 0


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({}, status(reasons.INFEASIBLE, "Planned")),
        ({}, status(reasons.SUSPENDED, "Suspended")),
        (STARTING, status(reasons.ALL_READY, generation=2)),
        (STARTING, status(reasons.OUT_OF_MEMORY)),
        (status(reasons.UNSCHEDULABLE), STARTING),
        (STARTING, status(reasons.COMPLETED, "Completed")),
        (status(reasons.SUSPENDED, "Suspended"), status(reasons.NOT_SUSPENDED, "Suspended")),
    ],
    ids=["no plan", "suspended", "new generation", "trouble", "trouble over", "end", "resumed"],
)
def test_what_is_urgent_is_written_at_once(rate, known, wanted):
    if "Completed" in str(wanted):
        known = known | {"conditions": [{"type": "Completed", "status": "False", "reason": reasons.IN_PROGRESS}]}
    assert rate.wait(KEY, known, wanted) == 0


def test_jobs_wait_each_for_itself(rate, clock):
    clock[0] += STATUS_SECONDS
    assert rate.wait(KEY, STARTING, status(reasons.ALL_READY)) == READY_SECONDS, "the coordinator may tell more by then"
    clock[0] += READY_SECONDS
    assert rate.wait(KEY, STARTING, status(reasons.ALL_READY)) == 0
    assert rate.wait(("team-b", "demo"), STARTING, status(reasons.ALL_READY)) == STATUS_SECONDS
    rate.forget(KEY)
    assert rate.wait(KEY, {}, STARTING) == STATUS_SECONDS, "another one of that name"


def test_of_many_jobs_that_start_most_have_one_status_that_says_they_run(clock):
    rate = StatusRate(lambda: clock[0])
    jobs = [("team-a", f"job-{number}") for number in range(200)]
    waits = [rate.wait(job, {}, STARTING) for job in jobs]
    assert waits[:STARTS_AT_ONCE] == [STATUS_SECONDS] * STARTS_AT_ONCE, "a few are as quick as one"
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_SECONDS, "nobody is kept in the dark for longer"
    assert [rate.wait(job, {}, STARTING) for job in jobs] == waits, "asking again costs no turn"
    assert rate.wait(jobs[-1], {}, status(reasons.OUT_OF_MEMORY)) == 0
    clock[0] += STATUS_SECONDS
    assert rate.wait(jobs[-1], {}, status(reasons.ALL_READY)) == READY_SECONDS
