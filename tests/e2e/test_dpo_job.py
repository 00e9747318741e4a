"""A whole job of the dpo stage on trainers alone: processes that are killed change no bit of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import Fault, Injector, events, history, run_job, same_weights, summary, tiny_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 40


def reached(step: int) -> Any:
    return lambda status: status["stage"] == "dpo" and (status["step"] or 0) >= step


def test_killed_trainers_and_coordinators_change_no_bit(tmp_path: Path) -> None:
    """KTO, which needs the reference twice: once for its loss and once for its estimate of the KL."""
    job = tiny_job(
        stages=["dpo"],
        dpo={
            "loss": "KTO",
            "steps": STEPS,
            "batchSize": 8,
            "microBatchSize": 4,
            "optimizer": {"learningRate": 1e-3},
        },
        groups=[{"name": "trainers", "roles": ["trainer"], "replicas": 2}],
        checkpoint={"everySteps": 1, "keep": 2},
    )
    peaceful, killed = tmp_path / "peaceful", tmp_path / "killed"
    outcome, _ = run_job(job, peaceful)
    assert outcome.succeeded, outcome.reason
    faults = [Fault("trainer-1", reached(4)), Fault("coordinator", reached(14)), Fault("trainer-0", reached(25))]
    killer = Injector(faults)
    outcome, _ = run_job(job, killed, killer)
    assert outcome.succeeded, outcome.reason
    assert killer.killed == ["trainer-1", "coordinator", "trainer-0"]
    assert same_weights(peaceful, killed) == []
    assert sorted(history(killed, "dpo")) == list(range(1, STEPS + 1))
    facts = summary(killed)["dpo"]
    assert facts == summary(peaceful)["dpo"]
    assert facts["loss_after"] < facts["loss_before"]
    assert len(events(killed, "stage.finished")) == 1
