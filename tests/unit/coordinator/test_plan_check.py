"""The report of PPO's iterations compares them with the plan's prediction and tells its status."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dovetail.coordinator.job import Job
from dovetail.coordinator.loop.iteration_report import IterationReport
from dovetail.coordinator.reporting.telemetry import Status
from dovetail.operator.reconcile import progress
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.prediction import Prediction
from helpers.plain import plain_spec

PREDICTED = Prediction(
    placement="Separation",
    schedule="Serial",
    migration=None,
    iteration_seconds=10.0,
    phases={"generation": 6.0, "inference": 1.0, "training": 2.0, "transfer": 1.0, "swap": 0.0},
    samples_per_second=12.8,
    hardware="data sheets",
    tasks=[],
    memory=[],
)


def report_of(prediction: Prediction | None) -> tuple[IterationReport, Any]:
    spec = plain_spec()
    plan = make_plan(spec).model_copy(update={"prediction": prediction})
    logged: list[tuple[str, Any]] = []
    records: Any = SimpleNamespace(
        store={}, progress=Status(), log=lambda event, **told: logged.append((event, told)), logged=logged
    )
    unused: Any = None
    return IterationReport(Job(spec, plan, Path(), "", records, unused)), records


def test_iterations_that_are_off_reach_the_jobs_status() -> None:
    report, records = report_of(PREDICTED)
    for _ in range(2):
        report._compare(16.0, {"generation": 12.0, "training": 2.0, "weights": 1.0, "other": 1.0})
    document = {**records.progress.document({}), "stage": "ppo"}
    assert progress.plan_problem(document) is None
    assert progress.fields(document)["predicted_iteration_seconds"] == 10.0
    for _ in range(2):
        report._compare(16.0, {"generation": 12.0, "training": 2.0, "weights": 1.0, "other": 1.0})
    document = {**records.progress.document({}), "stage": "ppo"}
    problem = progress.plan_problem(document)
    assert problem is not None
    assert problem.startswith("an iteration takes 16 s, 60% more than the 10 s predicted, most of it in generation")
    assert progress.fields(document)["predicted_iteration_seconds"] == 16.0
    assert records.logged == [("plan.off", {"problem": problem})]


def test_without_a_prediction_nothing_is_compared() -> None:
    report, records = report_of(None)
    assert report._check is None
    assert progress.plan_problem(records.progress.document({})) is None
    assert "predicted_iteration_seconds" not in progress.fields({**records.progress.document({}), "stage": "ppo"})


def test_a_plan_for_another_lag_is_not_compared() -> None:
    report, _ = report_of(PREDICTED.model_copy(update={"lag": 1}))
    assert report._check is None
