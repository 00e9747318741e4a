"""The sentence on who waits for whom names the process that stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.coordinator.reporting.wait_chain import (
    LATE_FACTOR,
    LATE_SECONDS,
    SILENT_SECONDS,
    Peer,
    PhaseClock,
    WaitingRun,
    wait_chain,
)

NOW = 1_000_000.0
LONG_AGO = NOW - SILENT_SECONDS - 60  # 13:45:30
ALIVE = WaitingRun(
    "generation",
    [Peer("trainer-0", NOW), Peer("trainer-1", NOW)],
    [Peer("rollouts-0", NOW, samples=2, token=NOW), Peer("rollouts-1", NOW, samples=3, token=NOW)],
    [Peer("rollouts-0-scorer", NOW), Peer("rollouts-1-scorer", NOW)],
    {},
)
IDLE = [Peer("rollouts-0", NOW), Peer("rollouts-1", NOW)]
STALE = [Peer("rollouts-0", NOW, "holds weight version 5, it must hold weight version 6")]
FROZEN = [Peer("trainer-0", NOW), Peer("trainer-1", LONG_AGO)]

CASES: dict[str, tuple[WaitingRun, str]] = {
    "a server stands still": (
        replace(ALIVE, servers=[ALIVE.servers[0], Peer("rollouts-1", LONG_AGO, samples=3, token=LONG_AGO)]),
        "it waits for 3 samples on rollouts-1; rollouts-1 has not reported since 13:45:30 UTC: ",
    ),
    "a server answers, but its engine core stands still": (
        replace(ALIVE, servers=[ALIVE.servers[0], Peer("rollouts-1", NOW, samples=3, token=LONG_AGO)]),
        "3 samples on rollouts-1, which reports, but has drawn no token since 13:45:30 UTC; its log says why",
    ),
    "servers wait for weights that a frozen trainer does not send": (
        replace(ALIVE, servers=STALE, trainers=FROZEN),
        "it waits for rollouts-0, which may not draw: holds weight version 5, it must hold weight version 6; the "
        "trainers send weights, and trainer-1 has not reported since ",
    ),
    "a frozen trainer in training": (
        replace(ALIVE, phase="training", servers=IDLE, trainers=FROZEN),
        "it waits for the trainers; trainer-1 has not reported since ",
    ),
    "a trainer that died has not come back": (
        replace(ALIVE, phase="training", trainers=[Peer("trainer-0", NOW), Peer("trainer-1", NOW, "has not joined")]),
        "it waits for trainer-1 to join the other trainers; the log of trainer-1 says why not",
    ),
    "a frozen trainer while weights are sent": (
        replace(ALIVE, phase="weights", servers=IDLE, trainers=FROZEN),
        "it waits for weights; trainer-1 has not reported since ",
    ),
    "a frozen server while weights are sent": (
        replace(ALIVE, phase="weights", servers=[IDLE[0], Peer("rollouts-1", LONG_AGO)]),
        "it waits for weights; rollouts-1 has not reported since ",
    ),
    "a trainer reports, but its main thread hangs": (
        replace(
            ALIVE,
            phase="training",
            trainers=[
                Peer("trainer-0", NOW, at="dovetail.trainer.engine.executor:494 in _wait"),
                Peer("trainer-1", NOW, at="dovetail.trainer.algorithms.policy:88 in loss"),
                Peer("trainer-2", NOW, at="dovetail.trainer.engine.executor:494 in _wait"),
                Peer("trainer-3", NOW),
            ],
        ),
        "all trainers report, but some make no progress: trainer-1 at dovetail.trainer.algorithms.policy:88 in loss, "
        "trainer-0 and 1 more at dovetail.trainer.engine.executor:494 in _wait; the first is the likeliest cause",
    ),
    "of two trainers, the one that waits in no collective hangs": (
        replace(
            ALIVE,
            phase="training",
            trainers=[
                Peer("trainer-0", NOW, at="executor:494 in _wait", waits="nccl:all_reduce 342"),
                Peer("trainer-1", NOW, at="policy:88 in loss"),
            ],
        ),
        "make no progress: trainer-1 at policy:88 in loss, trainer-0 at executor:494 in _wait, in nccl:all_reduce 342; "
        "the first is the likeliest cause",
    ),
    "a server that took weights and computes something else with them": (
        replace(ALIVE, phase="weights", servers=[Peer("rollouts-0", NOW, "its log-probabilities differ")]),
        "it waits for rollouts-0, which may not draw: its log-probabilities differ",
    ),
    "a trainer that hangs while it sends": (
        replace(
            ALIVE,
            phase="weights",
            servers=STALE,
            trainers=[Peer("trainer-0", NOW, at="dovetail.trainer.weight_sender:289 in send"), Peer("trainer-1", NOW)],
        ),
        "some make no progress: trainer-0 at dovetail.trainer.weight_sender:289 in send; ",
    ),
    "trainers that work": (
        replace(ALIVE, phase="training", servers=IDLE),
        "all trainers report and make progress",
    ),
    "a reward function that hangs": (
        replace(ALIVE, phase="inference", servers=IDLE, calls={"judge": LONG_AGO, "length": NOW}),
        "it waits for the reward function judge, which has been running since 13:45:30 UTC; ",
    ),
    "a frozen scorer": (
        replace(ALIVE, phase="inference", servers=IDLE, scorers=[Peer("rollouts-0-scorer", LONG_AGO)]),
        "it waits for scores; rollouts-0-scorer has not reported since ",
    ),
    "the only server is gone": (
        replace(ALIVE, servers=[Peer("rollouts-0", LONG_AGO, "silent for 70 s")]),
        "it waits for a server; rollouts-0 has not reported since ",
    ),
    "nobody stands still": (ALIVE, "it waits for 5 samples, and all servers draw tokens"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_culprit_is_named(case: str) -> None:
    found, sentence = CASES[case]
    told = wait_chain(found, NOW - 100, NOW)
    assert told.startswith(f"{found.phase} has gone on since 13:45:00 UTC: ")
    assert sentence in told
    later = wait_chain(found, NOW - 100, NOW + SILENT_SECONDS / 2)
    assert later == told, "it changes only if something happens, because each change is written to the job's status"


def test_a_phase_is_late_beside_those_before_it() -> None:
    clock, now = PhaseClock(), 0.0
    for iteration in range(1, 6):
        for second in range(100):  # longer than LATE_SECONDS
            late = clock.see("training", iteration, now + second)
        assert (late is None) == (iteration > 1), "nobody knows yet what is usual in the first iteration"
        now += 100
        assert clock.see(None, iteration, now) is None
    assert clock.see("training", 6, now) is None
    assert clock.see("training", 6, now + LATE_FACTOR * 100) is None
    assert clock.see("training", 6, now + LATE_FACTOR * 100 + 1) == now
    assert clock.see("weights", 6, now + LATE_FACTOR * 100 + 2) is None
    assert clock.see("weights", 6, now + LATE_FACTOR * 100 + 3 + LATE_SECONDS) == now + LATE_FACTOR * 100 + 2
