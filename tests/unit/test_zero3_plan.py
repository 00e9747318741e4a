"""Plans of jobs whose manifest asks for ZeRO-3."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_recompute_plan import A100, on_cpus, on_gpus

from dovetail.cli.common.plan_tables import plan_tables
from dovetail.coordinator.loop.scheduling import Scheduling
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.pipelines import FAMILIES
from dovetail.planner.candidate import Candidate, Placement, Share
from dovetail.planner.hardware import gpu
from dovetail.planner.inventory import Inventory, Pool
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placement.recommend import unexecuted


def gathered(spec: RLHFJobSpec) -> list[tuple[Stage, str]]:
    return [(row.stage, row.model) for row in make_plan(spec).batching if row.zero3]


LARGE = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}


def test_time_and_memory_are_those_of_weights_that_are_gathered_by_layer() -> None:
    """Weights travel for each sequence of 512 tokens."""
    plain, gathering = (make_plan(on_gpus(stages=["ppo"], zero3=way)).prediction for way in ("Auto", "Always"))
    assert plain is not None
    assert gathering is not None
    (before, after) = (next(t for t in p.tasks if t.task == "actor_training") for p in (plain, gathering))
    assert ("ZeRO-2" in before.details, "ZeRO-3" in after.details) == (True, True)
    assert before.seconds < after.seconds
    (held, least) = (sum(p.memory[0].parts.values()) for p in (plain, gathering))
    assert least < held / 2


def test_a_model_that_needs_it_is_refused_with_that_remedy() -> None:
    """8 data-parallel ranks with 13B, whose gathered weights and whole gradients alone are more than a GPU has."""

    def of(**plan: Any) -> RLHFJobSpec:
        document = on_gpus(**plan).model_dump(mode="json", by_alias=True)
        document["models"]["actor"]["source"]["scratch"]["config"] |= LARGE
        return RLHFJobSpec.model_validate(document)

    assert gathered(of(zero3="Always")) == [(Stage.SFT, "actor"), (Stage.PPO, "actor")]
    with pytest.raises(PlanError, match=r"sft needs [\d.]+ GiB .*; set spec.plan.zero3 to Always$"):
        make_plan(of())
    with pytest.raises(PlanError, match=r"sft needs [\d.]+ GiB") as refused:
        make_plan(of(intraStageFusion="VShaped"))
    assert "zero3" not in str(refused.value), "a rule refuses it beside VShaped"


def test_a_pin_holds_for_all_stages_and_for_ranks_that_share_a_batch() -> None:
    assert gathered(on_gpus(zero3="Always")) == [(Stage.SFT, "actor"), (Stage.PPO, "actor")]
    assert gathered(on_cpus()) == []
    alone = make_plan(on_cpus(zero3="Always"))  # pp 2, dp 1
    assert not any(row.zero3 for row in alone.batching)
    assert "spec.plan.zero3 is Always, which has no effect: no trained model has data-parallel ranks" in alone.warnings
    shared = on_cpus(zero3="Always", parallelism={"actor": {"dp": 2}})
    assert {model for _, model in gathered(shared)} == {"actor", "critic"}


def test_what_an_inventory_allows_is_told_to_need_the_pin_only_where_it_lacks() -> None:
    candidate = Candidate(Placement.SEPARATION, (Share("a100", 8, dp=8),), (Share("a100", dp=8, fsdp=3),))
    inventory = Inventory((Pool("a100", gpu(A100), 2, 8),))
    assert unexecuted(candidate, inventory) == ["ZeRO-3 is only used with spec.plan.zero3 set to Always"]
    assert unexecuted(candidate, inventory, zero3=True) == []


def test_plans_without_it_do_not_name_it() -> None:
    assert "zero3" not in make_plan(on_cpus()).model_dump_json(by_alias=True)


def test_the_table_of_batches_says_it() -> None:
    console = Console(width=160)
    with console.capture() as shown:
        console.print(plan_tables(make_plan(on_cpus(zero3="Always", parallelism={"actor": {"dp": 2}}))))
    assert shown.get().count("gathered by layer") == 3
    with console.capture() as shown:
        console.print(plan_tables(make_plan(on_cpus())))
    assert "gathered" not in shown.get()


def test_schedules_that_split_backwards_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Records(dict[str, Any]):
        def put(self, key: str, value: object) -> None:
            self[key] = value

    monkeypatch.setattr("dovetail.coordinator.loop.scheduling.SEARCH_SECONDS", 0.2)
    spec = on_cpus(zero3="Always")
    document = spec.model_dump(mode="json", by_alias=True)
    document["groups"][0]["replicas"] = 4
    document["plan"]["parallelism"] = {"actor": {"pp": 2, "dp": 2}}
    spec = RLHFJobSpec.model_validate(document)
    asyncio.run(Scheduling(spec, make_plan(spec), Records(), tmp_path, lambda *_, **__: None).begin())
    written = json.loads((tmp_path / "schedule.json").read_text())
    split = {name for name, family in FAMILIES.items() if family.split}
    assert "fused" in written["families"]
    assert not split & set(written["families"])
    assert all("spec.plan.zero3" in written["refused"][name] for name in split)
