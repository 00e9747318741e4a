"""The manifest's limit of activation memory, from validation to the schedule."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.loop.scheduling import Scheduling
from dovetail.coordinator.page.run_folder import RunFolder
from dovetail.local.report.report_schedule import schedule_section
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.make_plan import PlanError, make_plan

LLAMA = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search finds in more time is not the subject here."""
    monkeypatch.setattr("dovetail.coordinator.loop.scheduling.SEARCH_SECONDS", 0.3)


def job(trainers: int = 2, pp: int = 2, **plan: Any) -> RLHFJobSpec:
    document = {
        "stages": ["ppo"],
        "models": {"actor": {"source": {"scratch": {"architecture": "llama", "config": LLAMA}}}},
        "groups": [
            {"name": "t", "roles": ["trainer"], "replicas": trainers},
            {"name": "r", "roles": ["rollout"], "replicas": 1},
        ],
        "ppo": {"globalBatchSize": 32, "miniBatchSize": 32, "microBatchSize": 4, "epochs": 1},
        "plan": {"parallelism": {"actor": {"pp": pp, "dp": trainers // pp}}, **plan},
    }
    return RLHFJobSpec.model_validate(document)


def least(spec: RLHFJobSpec) -> float:
    """GiB of the largest micro-batch."""
    return max(size for each in make_plan(spec).activation_bytes.values() for size in each) / 2**30


def test_a_limit_below_any_schedule_is_refused_with_the_least_that_is_accepted() -> None:
    need = least(job())
    with pytest.raises(PlanError, match=r"^spec\.plan\.activationMemory is .* raise it, or lower") as refused:
        make_plan(job(activationMemory=need * 0.9, recompute="Never"))
    said = re.search(r"hold ([\d.e-]+) GiB on stage \d of the (actor|critic)", str(refused.value))
    assert said is not None
    assert need <= float(said[1]) < need * 1.01
    make_plan(job(activationMemory=float(said[1])))


def test_a_limit_without_a_pipeline_counts_as_well() -> None:
    with pytest.raises(PlanError, match=r"spec\.plan\.activationMemory"):
        make_plan(job(trainers=1, pp=1, activationMemory=least(job()) / 100))
    assert make_plan(job(trainers=1, pp=1)).activation_bytes == {}


def choose(spec: RLHFJobSpec, folder: Path) -> dict[str, Any]:
    class Records(dict[str, Any]):
        def put(self, key: str, value: object) -> None:
            self[key] = value

    async def go() -> None:
        scheduling = Scheduling(spec, make_plan(spec), Records(), folder, lambda *_, **__: None)
        await scheduling.begin()

    asyncio.run(go())
    found = RunFolder(folder).schedule()
    assert found
    return found


def test_schedules_keep_to_the_limit_and_the_report_says_it(tmp_path: Path) -> None:
    free = choose(job(), tmp_path)
    limit = least(job()) * 1.2  # one micro-batch at a time; serial 1F1B holds two
    found = choose(job(activationMemory=limit), tmp_path)
    assert found["memory"] <= limit * 2**30 < free["memory"]
    assert found["serial_memory"] > limit * 2**30
    assert found["after"]["makespan"] > free["after"]["makespan"]
    assert "serial" in found["refused"]
    assert "Limit of activation memory" in schedule_section(found)
