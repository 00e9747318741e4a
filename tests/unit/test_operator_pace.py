"""How often a status is written."""

import pytest

from dovetail.operator import reasons
from dovetail.operator.pace import STATUS_SECONDS, Pace

KEY = ("team-a", "demo")


def status(reason, kind="Running", generation=1, **more):
    found = {"type": kind, "status": str(reason == reasons.ALL_READY), "reason": reason, "message": "3 of 4"}
    return {"observedGeneration": generation, "conditions": [found], **more}


STARTING = status(reasons.STARTING)


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def pace(clock):
    made = Pace(lambda: clock[0])
    made.wrote(KEY)
    return made


def test_pods_that_start_wait_for_their_turn(pace, clock):
    for wanted in (status(reasons.ALL_READY), STARTING | {"iteration": 3}):
        assert pace.wait(KEY, STARTING, wanted) == STATUS_SECONDS
    clock[0] += STATUS_SECONDS
    assert pace.wait(KEY, STARTING, status(reasons.ALL_READY)) == 0


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({}, STARTING),
        (STARTING, status(reasons.ALL_READY, generation=2)),
        (STARTING, status(reasons.OUT_OF_MEMORY)),
        (status(reasons.UNSCHEDULABLE), STARTING),
        (STARTING, status(reasons.COMPLETED, "Completed")),
        (status(reasons.SUSPENDED, "Suspended"), status(reasons.NOT_SUSPENDED, "Suspended")),
    ],
    ids=["first", "new generation", "trouble", "trouble over", "end", "resumed"],
)
def test_what_is_urgent_is_written_at_once(pace, known, wanted):
    if "Completed" in str(wanted):
        known = known | {"conditions": [{"type": "Completed", "status": "False", "reason": reasons.IN_PROGRESS}]}
    assert pace.wait(KEY, known, wanted) == 0


def test_other_jobs_and_forgotten_ones_do_not_wait(pace):
    assert pace.wait(("team-b", "demo"), STARTING, status(reasons.ALL_READY)) == 0
    pace.forget(KEY)
    assert pace.wait(KEY, STARTING, status(reasons.ALL_READY)) == 0
