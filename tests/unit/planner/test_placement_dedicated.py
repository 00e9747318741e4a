"""Actor and critic trained on GPUs of their own, at once (PUZZLE's third plan): planned, predicted, and executed so."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_placement_job import A10, A100, MEDIUM, SEPARATE, SMALL, group, spec

from dovetail.cli.common.plan_tables import plan_tables
from dovetail.coordinator.schedules.scheduling import Scheduling
from dovetail.coordinator.schedules.stored_schedule import applies
from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.checks.rules import check
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.resolve import resolve
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage
from dovetail.operator.reconcile.replan import Need, honoured, resized
from dovetail.planner.candidate import Candidate, Placement, Share
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placements import fragment, recommend
from dovetail.planner.workload import Workload
from dovetail.protocol.plan import Plan
from helpers.estimates import estimate

# One GPU a pod: trainers' messages go over the network, where collectives of data-parallel ranks take long.
BOTH = [group("all", ["trainer", "rollout"], replicas=4)]
WIDE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
UNEVEN, TEN = WIDE | {"num_hidden_layers": 5}, {"num_hidden_layers": 10}
LONG = {"globalBatchSize": 128, "miniBatchSize": 128, "microBatchSize": 4, "epochs": 4, "oldLogProbs": "Rollout"}


def tasks(plan: Plan) -> dict[str, Any]:
    assert plan.prediction is not None
    return {task.task: task for task in plan.prediction.tasks}


@pytest.mark.slow
@pytest.mark.parametrize("groups", [SEPARATE, BOTH])
def test_what_is_pinned_is_predicted_as_it_runs(groups: list[dict[str, Any]]) -> None:
    plan = make_plan(spec(groups, plan={"intraStageFusion": "Dedicated"}))
    assert plan.schedule == "Dedicated"
    assert set(plan.dedicated) == {"actor", "critic"}
    assert plan.dedicated["critic"].first == world_size(plan.dedicated["actor"])
    assert sum(map(world_size, plan.dedicated.values())) == plan.world_size == 4
    found = tasks(plan)
    actor, critic = found["actor_training"], found["critic_training"]
    assert [(t.first, t.gpus, t.pp, t.dp) for t in (actor, critic)] == [
        (layout.first, world_size(layout), layout.pp, layout.dp) for layout in plan.dedicated.values()
    ]
    assert plan.prediction is not None
    assert plan.prediction.schedule == "Dedicated"
    assert plan.prediction.phases["training"] == pytest.approx(max(actor.seconds, critic.seconds))
    for memory in plan.prediction.memory:
        if memory.group == groups[0]["name"]:
            trained = {part.partition(":")[0] for part in memory.parts if "_training" in part}
            assert trained == {"actor_training" if memory.first < critic.first else "critic_training"}
    rows = {row.model: row.micro_batches for row in plan.batching if row.stage is Stage.PPO}
    assert rows == {name: 64 // (2 * layout.dp) for name, layout in plan.dedicated.items()}
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan
    shown = Console(width=160)
    with shown.capture() as text:
        shown.print(plan_tables(plan))
    assert "critic in PPO, on ranks" in text.get()
    # What a model's ranks need is less: they hold no other model.
    serial = make_plan(spec(groups, plan={"intraStageFusion": "Serial"})).prediction
    assert serial is not None
    assert serial.phases["training"] > plan.prediction.phases["training"]


@pytest.mark.slow
def test_auto_gives_models_ranks_of_their_own_only_where_that_is_worth_it() -> None:
    """Five layers are unequal in four stages, less so in two."""
    auto, shared = (
        make_plan(spec(BOTH, UNEVEN, ppo=LONG, plan={"intraStageFusion": pin})).prediction for pin in ("Auto", "Fused")
    )
    assert auto is not None
    assert shared is not None
    assert (auto.schedule, shared.schedule) == ("Dedicated", "Fused")
    assert auto.phases["training"] < shared.phases["training"] / 1.1
    assert auto.iteration_seconds < shared.iteration_seconds / 1.05
    flat = make_plan(spec(BOTH, UNEVEN, ppo=LONG, plan={"placement": "Flattening"}))
    assert flat.dedicated == {}, "every task on every GPU"
    # Ten layers gain, but less than the models of time can tell.
    near = make_plan(spec([group("t", ["trainer"], replicas=4), SEPARATE[1]], SMALL | TEN, ppo=LONG))
    assert near.dedicated == {}
    assert near.prediction is not None
    others = [a.seconds for a in near.prediction.alternatives if "dedicated GPUs" in a.note and a.seconds is not None]
    assert min(others) < near.prediction.iteration_seconds < 1.05 * min(others) + 0.08


def test_pinned_layouts_are_divided_as_trainers_divide_them() -> None:
    pins = {"parallelism": {"actor": {"pp": 2, "dp": 2}}}
    plan = make_plan(spec(plan={**pins, "intraStageFusion": "Dedicated"}))
    assert plan.parallelism["actor"] == Parallelism(pp=2, dp=2)
    assert {name: (layout.pp, layout.dp) for name, layout in plan.dedicated.items()} == {
        "actor": (1, 2),
        "critic": (1, 2),
    }
    assert make_plan(spec(plan=pins)).dedicated == {}


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    one = [group("t", ["trainer"]), group("gen", ["rollout"])]
    with pytest.raises(PlanError, match="intraStageFusion is Dedicated, but the 1 trainer ranks cannot be divided"):
        make_plan(spec(one, plan={"intraStageFusion": "Dedicated"}))
    alone = spec(one, plan={"intraStageFusion": "Dedicated"}, ppo={"advantage": "grpo", "samplesPerPrompt": 4})
    assert any("no critic is trained" in warning for warning in make_plan(alone).warnings)


class Records(dict[str, Any]):
    """A store in memory."""

    def put(self, key: str, value: object) -> None:
        self[key] = value


@pytest.mark.slow
def test_the_coordinator_keeps_to_the_plans_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.3)
    job = spec(BOTH, UNEVEN, ppo=LONG)
    plan = make_plan(job)
    assert plan.dedicated
    assert applies(job, plan)

    async def chosen() -> Any:
        scheduling = Scheduling(job, plan, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        assert scheduling.layouts == plan.dedicated
        return await scheduling.current()

    schedule = asyncio.run(chosen())
    assert schedule.family == "dedicated"
    own = world_size(plan.dedicated["actor"])
    models = [{action.model for action in mine} for mine in schedule.actions()]
    assert models == [{"actor"}] * own + [{"critic"}] * (4 - own)


@pytest.mark.slow
def test_schedules_of_both_models_are_left_out_where_only_turns_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data-parallel ranks hold gathered weights and whole gradients of the models that a schedule runs."""
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.3)
    groups = [group("train", ["trainer"], replicas=4), group("gen", ["rollout"])]
    pins = {"zero3": "Never", "parallelism": {model: {"pp": 2, "dp": 2} for model in ("actor", "critic")}}

    def planned(layers: int) -> tuple[RLHFJobSpec, Plan]:
        job = spec(groups, {**MEDIUM, "num_hidden_layers": layers}, plan=pins)
        return job, make_plan(job)

    _, roomy = planned(24)
    assert roomy.schedule == "Auto"
    job, full = planned(28)
    assert full.prediction is not None
    assert full.prediction.schedule == full.schedule == "Serial"

    async def chosen() -> Any:
        scheduling = Scheduling(job, full, Records(), tmp_path, lambda *_, **__: None)
        await scheduling.begin()
        return await scheduling.current()

    assert asyncio.run(chosen()).family == "serial"


def test_when_nodes_change_the_ranks_stay() -> None:
    groups = [group("t", ["trainer"], per_pod=4), group("gen", ["rollout"], A10, replicas=1)]
    job = spec(groups, UNEVEN, plan={"intraStageFusion": "Dedicated"})
    plan = make_plan(job)
    asked = resized(job, plan, [Need("gen", A10, 1, 1, 4, 1, False)], {"gen": 3})
    assert asked is not None
    other = make_plan(asked)
    shown = honoured(plan, other)
    assert len(shown.rollouts) == 3
    assert shown.dedicated == other.dedicated == plan.dedicated
    assert shown.prediction is not None
    elsewhere = other.model_copy(update={"dedicated": {}})
    assert honoured(plan, elsewhere).prediction is None


@pytest.mark.slow
def test_an_inventorys_division_is_executed_and_found_again_on_its_groups() -> None:
    job = spec(plan={"intraStageFusion": "Dedicated"})
    chosen = recommend(job, {}, Inventory((Pool("a100", gpu(A100), 1, 8),)))
    assert chosen.candidate.schedule == "Dedicated"
    written = fragment(chosen)
    data = job.model_dump(by_alias=True, mode="json")
    data["groups"] = written["groups"]
    data["ppo"] |= written["ppo"]
    data["plan"] |= written["plan"]
    again = RLHFJobSpec.model_validate(data)
    assert check(again) == []
    plan = make_plan(resolve(again))
    assert {t: tasks(plan)[t].gpus for t in ("actor_training", "critic_training")} == {
        t.task: t.gpus for t in chosen.prediction.tasks if t.task.endswith("_training")
    }


def test_memory_of_scorers_counts_on_every_gpu_of_a_server_that_trains_one_of_the_models() -> None:
    """Copies of split models are numbered through, but each is on the first GPUs of its own server."""
    trained = (Share("a", dp=4), Share("a", first=4, dp=12))
    candidate = Candidate(
        Placement.FLATTENING,
        (Share("a", tp=8, dp=2),),
        (trained[0],),
        (trained[1],),
        reference=(Share("a", pp=2, dp=2),),
        schedule="Dedicated",
        beside=True,
    )
    small = ModelShape("llama", 24, 2048, 5504, 16, 16, 128, 32000)
    job = Workload(small, small, None, small, 64, 64, 1, Lengths.fixed(64), Lengths.fixed(64))
    used = estimate(candidate, job, Inventory((Pool("a", gpu(A100), 2, 8),))).memory
    for cell in used:
        assert any(part.startswith("reference") for part in cell.device), "of either model's ranks"
    apart = replace(candidate, generation=(Share("b", tp=8, dp=2),), reference=(Share("b", pp=2, dp=2),))
    there = Inventory(tuple(Pool(name, gpu(A100), 2, 8) for name in "ab"))
    holding = [m for m in estimate(apart, job, there).memory if any(p.startswith("reference") for p in m.device)]
    assert [(m.pool, m.range) for m in holding] == [("b", range(4))]


@pytest.mark.slow
def test_an_inventorys_division_must_be_worth_it_too() -> None:
    """On fast GPUs of one node a small model gains nothing that the models of time can tell."""
    tiny = SMALL | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    chosen = recommend(spec(config=tiny), {}, Inventory((Pool("a100", gpu(A100), 1, 4),)))
    assert chosen.prediction.note in ("", "training on GPUs of its own")
    assert chosen.prediction.schedule != "Dedicated"
    kinds = [(other.placement, other.note) for other in chosen.prediction.alternatives]
    assert len(set(kinds)) == len(kinds)
    assert (chosen.prediction.placement, chosen.prediction.note) not in kinds
