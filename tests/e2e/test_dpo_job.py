"""A whole job of the dpo stage on trainers alone: neither its pipeline nor processes that are killed change its weights
by a bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dovetail.coordinator.schedules.training_schedule import pinned_families
from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.http import direct
from helpers.jobs import Fault, Injector, events, history, read_status, run_job, same_weights, summary, tiny_job

pytestmark = pytest.mark.slow

STEPS = 20


def reached(step: int) -> Any:
    return lambda status: status["stage"] == "dpo" and (status["step"] or 0) >= step


def job(pin: str) -> RLHFJob:
    """KTO, which needs the reference twice: once for its loss and once for its estimate of the KL."""
    actor = tiny_job().spec.models.actor.model_dump(by_alias=True, exclude_none=True)
    actor["source"]["scratch"]["config"]["num_hidden_layers"] = 4
    return tiny_job(
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
        plan={"parallelism": {"actor": {"pp": 2}}, "intraStageFusion": pin},
    )


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job in a V that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("peaceful")
    outcome, _ = run_job(job("VShaped"), run_dir)
    assert outcome.succeeded, outcome.reason
    return run_dir


def test_a_job_of_dpo_learns_in_a_v(peaceful: Path) -> None:
    loads = [(e["checkpoint_step"], e["target_step"]) for e in events(peaceful, "trainers.load")]
    assert loads == [(0, 0), (0, 0), (10, 10)], "the second half of the reference after the first half of the steps"
    assert sorted(history(peaceful, "dpo")) == list(range(1, STEPS + 1))
    facts = summary(peaceful)["dpo"]
    assert facts["loss_after"] < facts["loss_before"]
    assert json.loads((peaceful / "schedule-dpo.json").read_text())["chosen"] in pinned_families("VShaped", 1)


@pytest.mark.nightly
@pytest.mark.parametrize("pin", ["VShaped", "Serial"])
def test_killed_trainers_and_coordinators_change_no_bit(tmp_path: Path, peaceful: Path, pin: str) -> None:
    faults = [Fault("trainer-1", reached(3)), Fault("coordinator", reached(8)), Fault("trainer-0", reached(13))]
    killer = Injector(faults)
    outcome, _ = run_job(job(pin), tmp_path, killer)
    assert outcome.succeeded, outcome.reason
    assert killer.killed == ["trainer-1", "coordinator", "trainer-0"]
    assert same_weights(peaceful, tmp_path) == []
    assert sorted(history(tmp_path, "dpo")) == list(range(1, STEPS + 1))
    assert summary(tmp_path)["dpo"] == summary(peaceful)["dpo"]
    assert len(events(tmp_path, "stage.finished")) == 1
    assert (tmp_path / "schedule-dpo.json").exists() == (pin == "VShaped")


class Drain(Injector):
    """Tells the coordinator that trainer 0 will end, as the hook of its pod does, and then ends it."""

    def __init__(self) -> None:
        super().__init__([])
        self.step, self.left = 0, False

    def look(self, launcher: Launcher) -> None:
        status = read_status(launcher)
        if self.step or status is None or status["stage"] != "sft" or (status["step"] or 0) < 3:
            return
        self.step = status["step"]
        url, token = f"{launcher.url}/v1/instances/trainer-0?wait=600", launcher.token
        self.left = json.loads(direct.ask(url, 900, token, "DELETE") or b"{}").get("left", False)
        os.kill(launcher.pids["trainer-0"], signal.SIGKILL)


def test_trainers_that_are_drained_write_a_checkpoint_first(tmp_path: Path) -> None:
    """No other one is due, so without it all steps would be repeated."""
    drain = Drain()
    outcome, _ = run_job(
        tiny_job(
            stages=["sft"],
            sft={"steps": 200},
            groups=[{"name": "trainers", "roles": ["trainer"]}],
            checkpoint={"everySteps": 1000},
        ),
        tmp_path,
        drain,
    )
    assert outcome.succeeded, outcome.reason
    assert drain.left, "its pod need not wait longer"
    first, second = [event["checkpoint_step"] for event in events(tmp_path, "trainers.load")]
    assert first == 0
    assert second >= drain.step
    assert sorted(history(tmp_path, "sft")) == list(range(1, 201))


@pytest.mark.nightly
def test_a_run_goes_on_with_fewer_and_with_more_trainer_ranks(tmp_path: Path) -> None:
    """Two ranks that share the data, one, and two in a pipeline. Every step learns what it learns in peace, up to
    rounding, and each once."""

    def job(replicas: int, parallelism: dict[str, int]) -> Any:
        actor = {"pp": 1, "dp": 1} | parallelism
        return tiny_job(
            stages=["dpo"],
            dpo={"steps": 60, "batchSize": 8, "microBatchSize": 2, "optimizer": {"learningRate": 1e-3}},
            groups=[{"name": "trainers", "roles": ["trainer"], "replicas": replicas}],
            checkpoint={"everySteps": 1, "keep": 2},
            plan={"parallelism": {"actor": actor}},
        )

    def until(step: int) -> Injector:
        return Injector([], interrupt_when=reached(step))

    peaceful, changed = tmp_path / "peaceful", tmp_path / "changed"
    outcome, _ = run_job(job(2, {"dp": 2}), peaceful)
    assert outcome.succeeded, outcome.reason
    outcome, _ = run_job(job(2, {"dp": 2}), changed, until(11))
    assert outcome.interrupted
    outcome, said = run_job(job(1, {}), changed, until(21), resume=True)
    assert outcome.interrupted
    assert "trainer ranks 1 (actor: pp 1, dp 1, tp 1), after 2 (actor: pp 1, dp 2, tp 1)" in "\n".join(said)
    assert "weights differ by rounding" in "\n".join(said)
    outcome, said = run_job(job(2, {"pp": 2}), changed, resume=True)
    assert outcome.succeeded, outcome.reason

    one, other = history(peaceful, "dpo"), history(changed, "dpo")
    assert sorted(one) == sorted(other) == list(range(1, 61))
    for step in one:
        for name in ("loss", "grad_norm"):
            found = [value for key, value in sorted(other[step].items()) if key.endswith(name)]
            assert found
            assert found == pytest.approx([v for key, v in sorted(one[step].items()) if key.endswith(name)], rel=1e-3)
    assert [e["stage"] for e in events(changed, "trainers.changed")] == ["dpo", "dpo"]
    rows = [row for row in summary(changed)["changes"] if row["field"] == "trainer ranks"]
    assert [row["new"] for row in rows] == ["1 (actor: pp 1, dp 1, tp 1)", "2 (actor: pp 2, dp 1, tp 1)"]
    # The last checkpoint, and the last result: an interrupted run is a few steps further on a fast machine.
    assert all(least <= row["step"] <= row["settled"] < 60 for least, row in zip((10, 20), rows, strict=True))
    assert rows[0]["settled"] >= 11
    files = ((run / "models/actor").glob("*.safetensors") for run in (peaceful, changed))
    a, b = ({name: array for file in each for name, array in load_file(file).items()} for each in files)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-2, atol=1e-4, err_msg=name)
    assert same_weights(peaceful, changed)
