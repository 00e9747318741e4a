"""The manifest's limit of activation memory, from validation to the schedule."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.schedules.scheduling import Scheduling
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.protocol.plan import Plan

LLAMA = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search finds in more time is not the subject here."""
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.3)


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


@pytest.mark.slow
def test_schedules_keep_to_the_limit_and_the_document_says_it(tmp_path: Path) -> None:
    free = choose(job(), tmp_path)
    limit = least(job()) * 1.2  # one micro-batch at a time; serial 1F1B holds two
    found = choose(job(activationMemory=limit), tmp_path)
    assert found["memory"] <= limit * 2**30 < free["memory"]
    assert found["serial_memory"] > limit * 2**30
    assert found["after"]["makespan"] > free["after"]["makespan"]
    assert "serial" in found["refused"]
    assert found["memory_limit"] == limit * 2**30


LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
A100 = "NVIDIA-A100-SXM4-80GB"


def on_gpus(layers: int = 32, micro_batches: int = 4, **plan: Any) -> RLHFJobSpec:
    """7B + 7B on four A100s with four pipeline stages, and servers on others."""
    config = {**LLAMA_7B, "num_hidden_layers": layers, "max_position_embeddings": 4096}
    samples = 2 * micro_batches
    document = {
        "stages": ["ppo"],
        "models": {
            "actor": {"source": {"scratch": {"architecture": "llama", "config": config}}},
            "tokenizer": {"train": {"vocabSize": 32000}},
        },
        "data": {"maxPromptTokens": 512},
        "generation": {"maxTokens": 512},
        "groups": [
            {"name": "t", "roles": ["trainer"], "gpu": {"product": A100, "perPod": 4}},
            {"name": "r", "roles": ["rollout"], "gpu": {"product": A100, "perPod": 1}, "replicas": 4},
        ],
        "ppo": {"globalBatchSize": samples, "miniBatchSize": samples, "microBatchSize": 2, "epochs": 1},
        "plan": {"parallelism": {"actor": {"pp": 4}}, "recompute": "Never", **plan},
    }
    return RLHFJobSpec.model_validate(document)


def counted(plan: Plan) -> float:
    """GiB of activations of both models that the plan counts on a trainer's GPU."""
    assert plan.prediction is not None
    parts = next(memory.parts for memory in plan.prediction.memory if memory.group == "t")
    return sum(size for name, size in parts.items() if name.endswith("activations of both models")) / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [4, pytest.param(8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fusion", ["VShaped", "Fused", "TimeSharing"])
def test_on_gpus_no_schedule_holds_more_than_the_plan_counted(fusion: str, micro_batches: int, tmp_path: Path) -> None:
    for layers in (16, 10):  # ten in eight stages: the first two of them have two layers
        spec = on_gpus(layers, micro_batches, intraStageFusion=fusion)
        plan = make_plan(spec)
        found = choose(spec, tmp_path)
        assert plan.schedule == fusion
        assert found["in_bytes"]
        assert found["memory"] / 2**30 <= counted(plan) * (1 + 2e-6)
        assert found["memory_limit"] / 2**30 == pytest.approx(counted(plan), rel=1e-5), "the limit is what was counted"


def test_a_v_that_fits_is_not_refused() -> None:
    """Both models of 7B under a schedule that holds what serial 1F1B holds. Counted twice it would not fit."""
    plan = make_plan(on_gpus(intraStageFusion="VShaped"))
    assert (plan.schedule, plan.chunks) == ("VShaped", 2)
    assert plan.recomputed(Stage.PPO) == []


@pytest.mark.slow
def test_the_manifests_limit_is_counted_on_gpus(tmp_path: Path) -> None:
    """A higher one lets schedules hold more, up to all micro-batches, and a lower one makes a job fit."""
    serial = counted(make_plan(on_gpus(16, intraStageFusion="VShaped")))
    for limit, expected in ((serial / 2, serial / 2), (1.5 * serial, 1.5 * serial), (9 * serial, 2 * serial)):
        spec = on_gpus(16, intraStageFusion="VShaped", activationMemory=limit)
        assert counted(make_plan(spec)) == pytest.approx(expected, rel=1e-6)
        assert choose(spec, tmp_path)["memory"] / 2**30 <= expected * (1 + 2e-6)
