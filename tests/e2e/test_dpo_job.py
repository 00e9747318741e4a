"""A whole job of the dpo stage on trainers alone: neither its pipeline nor processes that are killed change its weights
by a bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.schedules.training_schedule import pinned_families
from helpers.jobs import Fault, Injector, events, history, run_job, same_weights, summary, tiny_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 20


def reached(step: int) -> Any:
    return lambda status: status["stage"] == "dpo" and (status["step"] or 0) >= step


def test_killed_trainers_and_coordinators_change_no_bit(tmp_path: Path) -> None:
    """KTO, which needs the reference twice: once for its loss and once for its estimate of the KL. In 1F1B, and in a V
    whose processes are killed."""
    actor = tiny_job().spec.models.actor.model_dump(by_alias=True, exclude_none=True)
    actor["source"]["scratch"]["config"]["num_hidden_layers"] = 4
    job = tiny_job(
        stages=["dpo"],
        models={"actor": actor},
        dpo={
            "loss": "KTO",
            "steps": STEPS,
            "batchSize": 8,
            "microBatchSize": 2,
            "optimizer": {"learningRate": 1e-3},
        },
        groups=[{"name": "trainers", "roles": ["trainer"], "replicas": 2}],
        checkpoint={"everySteps": 1, "keep": 2},
        plan={"parallelism": {"actor": {"pp": 2}}, "intraStageFusion": "Serial"},
    )
    peaceful, killed = tmp_path / "peaceful", tmp_path / "killed"
    outcome, _ = run_job(job, peaceful)
    assert outcome.succeeded, outcome.reason
    faults = [Fault("trainer-1", reached(3)), Fault("coordinator", reached(8)), Fault("trainer-0", reached(13))]
    killer = Injector(faults)
    plan = job.spec.plan.model_copy(update={"intra_stage_fusion": "VShaped"})
    outcome, _ = run_job(job.model_copy(update={"spec": job.spec.model_copy(update={"plan": plan})}), killed, killer)
    assert outcome.succeeded, outcome.reason
    assert killer.killed == ["trainer-1", "coordinator", "trainer-0"]
    assert same_weights(peaceful, killed) == []
    assert sorted(history(killed, "dpo")) == list(range(1, STEPS + 1))
    facts = summary(killed)["dpo"]
    assert facts == summary(peaceful)["dpo"]
    assert facts["loss_after"] < facts["loss_before"]
    assert len(events(killed, "stage.finished")) == 1
    assert json.loads((killed / "schedule-dpo.json").read_text())["chosen"] in pinned_families("VShaped", 1)
    assert not (peaceful / "schedule-dpo.json").exists()
