"""Plans of jobs whose manifest asks for ZeRO-3."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_recompute_plan import A100, on_cpus, on_gpus

from dovetail.cli.common.plan_tables import plan_tables
from dovetail.coordinator.schedules.scheduling import Scheduling
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.launch.local.rundir import zero3_of_run
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.pipelines import FAMILIES
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placements import fragment, recommend, taken
from dovetail.planner.planned_job import Chosen, Placed
from dovetail.protocol.prediction import Alternative


def gathered(spec: RLHFJobSpec) -> list[tuple[Stage, str]]:
    return [(row.stage, row.model) for row in make_plan(spec).batching if row.zero3]


LARGE = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}


def test_time_and_memory_are_those_of_weights_that_are_gathered_by_layer() -> None:
    """Weights travel for each sequence of 512 tokens."""
    plain, gathering = (make_plan(on_gpus(stages=["ppo"], zero3=way)).prediction for way in ("Never", "Always"))
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
    assert gathered(of()) == [(Stage.SFT, "actor"), (Stage.PPO, "actor")]
    with pytest.raises(PlanError, match=r"sft needs [\d.]+ GiB .*; set spec.plan.zero3 to Auto$"):
        make_plan(of(zero3="Never"))
    assert gathered(of(zero3="Auto", intraStageFusion="VShaped")) == gathered(of())
    with pytest.raises(PlanError, match=r"sft needs [\d.]+ GiB .*; set spec.plan.zero3 to Auto$"):
        make_plan(of(zero3="Never", intraStageFusion="VShaped"))


def test_a_pin_holds_for_all_stages_and_for_ranks_that_share_a_batch() -> None:
    assert gathered(on_gpus(zero3="Always")) == [(Stage.SFT, "actor"), (Stage.PPO, "actor")]
    assert gathered(on_cpus()) == []
    alone = make_plan(on_cpus(zero3="Always"))  # pp 2, dp 1
    assert not any(row.zero3 for row in alone.batching)
    assert "spec.plan.zero3 is Always, which has no effect: no trained model has data-parallel ranks" in alone.warnings
    shared = on_cpus(zero3="Always", parallelism={"actor": {"dp": 2}})
    assert {model for _, model in gathered(shared)} == {"actor", "critic"}


def eight_gpus(**plan: Any) -> RLHFJobSpec:
    """7B actor and critic on 8 A100s, whose generation and scores are elsewhere."""
    document = on_gpus(stages=["reward", "ppo"], **plan).model_dump(mode="json", by_alias=True)
    document["models"]["reward"] = {}
    document["data"] |= {"maxTokens": 1024, "maxPromptTokens": 512}
    ppo = {
        "advantage": "gae",
        "globalBatchSize": 512,
        "miniBatchSize": 256,
        "microBatchSize": 16,
        "samplesPerPrompt": 1,
    }
    document["ppo"] |= ppo
    document["generation"]["maxTokens"] = 512
    document["plan"] |= {"parallelism": "Auto", "recompute": "Auto"}
    return RLHFJobSpec.model_validate(document)


@pytest.mark.slow
def test_auto_takes_it_where_an_iteration_gains_enough() -> None:
    """Without it activations do not fit, and are computed again."""
    without, chosen = make_plan(eight_gpus(zero3="Never")), make_plan(eight_gpus())
    assert without.prediction is not None
    assert chosen.prediction is not None
    assert chosen.gathered_by_layer(Stage.PPO) == ["actor", "critic"]
    assert chosen.prediction.iteration_seconds < without.prediction.iteration_seconds / 1.05
    again = [[row.recompute for row in plan.batching if row.stage is Stage.PPO] for plan in (without, chosen)]
    assert again == [[True, True], [False, False]]
    (other,) = (other for other in chosen.prediction.alternatives if other.note == "without ZeRO-3")
    assert other.seconds == without.prediction.iteration_seconds
    assert chosen.gathered_by_layer(Stage.REWARD) == [], "the reward model fits without it"


def test_the_plan_without_it_is_an_alternative_with_its_own_placement() -> None:
    """The alternatives are in order: the fastest first, then those that fail."""
    known = make_plan(eight_gpus()).prediction
    assert known is not None

    def placed(placement: str, seconds: float, **more: Any) -> Placed:
        rows = [
            Alternative(placement="Flattening", seconds=9.0),
            Alternative(placement="Separation", problem="no room"),
        ]
        changes = {"placement": placement, "iteration_seconds": seconds, "alternatives": rows}
        mine = known.model_copy(update=changes)
        chosen: Any = Chosen(None, None, mine)  # type: ignore[arg-type]
        return Placed({}, mine, chosen=chosen, **more)

    found = placed("Interleaving", 8.0, by_layer=frozenset({(Stage.PPO, "actor")}))
    slower, refused = taken(placed("Separation", 10.0), "", found), taken(None, "too large", found)
    assert slower.prediction is not None
    assert refused.prediction is not None
    rows = [(other.placement, other.note, other.seconds) for other in slower.prediction.alternatives]
    assert rows == [("Flattening", "", 9.0), ("Separation", "without ZeRO-3", 10.0), ("Separation", "", None)]
    assert [other.problem for other in refused.prediction.alternatives] == [None, "too large", "no room"]


@pytest.mark.slow
def test_auto_stays_without_it_where_it_gains_nothing_or_little() -> None:
    little = eight_gpus().model_copy(update={"ppo": eight_gpus().ppo.model_copy(update={"micro_batch_size": 1})})
    assert gathered(little) == []
    assert make_plan(little) == make_plan(
        little.model_copy(update={"plan": little.plan.model_copy(update={"zero3": "Never"})})
    )
    # In one layout it is never faster, so nothing is looked for.
    assert gathered(on_gpus()) == []


@pytest.mark.slow
def test_what_a_run_began_with_is_kept() -> None:
    spec = eight_gpus()
    for began in (True, False):
        plan = make_plan(spec, zero3=began)
        assert bool(plan.gathered_by_layer(Stage.PPO)) is began
        pinned = make_plan(eight_gpus(zero3="Always" if began else "Never"))
        assert plan.parallelism == pinned.parallelism
    assert bool(make_plan(eight_gpus(zero3="Never"), zero3=True).gathered_by_layer(Stage.PPO)) is False


def test_a_stage_that_needs_it_leaves_ppo_without() -> None:
    """Only SFT has long micro-batches. A run that is resumed finds the same plan."""
    spec = on_gpus(tokens=4096, micro=2, recompute="Never")
    assert gathered(spec) == [(Stage.SFT, "actor")]
    found, alone = make_plan(spec).prediction, make_plan(on_gpus(stages=["ppo"], recompute="Never")).prediction
    assert found is not None
    assert alone is not None
    assert found.iteration_seconds == alone.iteration_seconds
    assert make_plan(spec, zero3=False) == make_plan(spec)
    with pytest.raises(PlanError, match=r"sft needs [\d.]+ GiB"):
        make_plan(on_gpus(tokens=4096, micro=2, recompute="Never", zero3="Never"))


@pytest.mark.slow
def test_a_resumed_run_is_asked_what_it_began_with(tmp_path: Path) -> None:
    assert zero3_of_run(tmp_path) is None
    for began in (True, False):
        plan = make_plan(eight_gpus(), zero3=began)
        (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
        assert zero3_of_run(tmp_path) is began
    (tmp_path / "plan.json").write_text(make_plan(on_gpus(stages=["sft"])).model_dump_json(by_alias=True))
    assert zero3_of_run(tmp_path) is None
    (tmp_path / "plan.json").write_text("{")
    assert zero3_of_run(tmp_path) is None


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    gpus=st.sampled_from([(1, 4), (2, 2), (4, 1), (8, 1)]),
    micro=st.sampled_from([1, 2, 4, 8]),
    tokens=st.sampled_from([256, 512, 1024]),
    product=st.sampled_from([A100, "NVIDIA-H100-80GB-HBM3", "NVIDIA-B200"]),
    layers=st.sampled_from([8, 16, 32]),
)
def test_auto_is_as_fast_as_never_and_follows_one_of_the_pins(
    gpus: tuple[int, int], micro: int, tokens: int, product: str, layers: int
) -> None:
    """If only one of the pins fits, Auto is that one. It takes ZeRO-3 for a gain of 5 % at least."""
    document = eight_gpus().model_dump(mode="json", by_alias=True)
    document["groups"][0] |= {"replicas": gpus[1], "gpu": {"product": product, "perPod": gpus[0]}}
    document["ppo"]["microBatchSize"] = micro
    document["generation"]["maxTokens"] = document["data"]["maxPromptTokens"] = tokens
    document["models"]["actor"]["source"]["scratch"]["config"]["num_hidden_layers"] = layers
    found: dict[str, Any] = {}
    for way in ("Never", "Always", "Auto"):
        document["plan"]["zero3"] = way
        with contextlib.suppress(PlanError):
            found[way] = make_plan(RLHFJobSpec.model_validate(document))
    assert ("Auto" in found) is ("Never" in found or "Always" in found)
    if "Auto" not in found:
        return
    auto = found["Auto"]
    if auto.gathered_by_layer(Stage.PPO):
        assert auto.parallelism["actor"].dp > 1
        if "Never" in found:
            assert 1.05 * auto.prediction.iteration_seconds < found["Never"].prediction.iteration_seconds
    else:
        assert auto == found["Never"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["Auto", "Always", "Never"])
def test_what_an_inventory_allows_names_it_in_the_manifest(way: str) -> None:
    inventory = Inventory((Pool("a100", gpu(A100), 1, 8, 25e9),))
    document = eight_gpus(zero3=way).model_dump(mode="json", by_alias=True)
    document["models"]["actor"]["source"]["scratch"]["config"] |= LARGE
    chosen = recommend(RLHFJobSpec.model_validate(document), {}, inventory)
    uses = any(share.gathers for share in (*chosen.candidate.actor_training, *chosen.candidate.critic_training))
    assert uses is (way != "Never"), "13B models are split over 4 ranks without it, and over 2 with it"
    assert fragment(chosen)["plan"].get("zero3") == ("Always" if uses else None)


def test_a_pin_has_no_effect_if_each_model_has_one_rank_of_its_own() -> None:
    """On both ranks together the models would have data-parallel ranks."""
    document = eight_gpus(zero3="Always", intraStageFusion="Dedicated").model_dump(mode="json", by_alias=True)
    document["stages"], document["models"]["reward"] = ["ppo"], {"function": "rewards:score"}
    document["models"]["actor"]["source"]["scratch"]["config"]["num_hidden_layers"] = 8
    document["groups"][0]["gpu"]["perPod"] = 2
    document["plan"]["parallelism"] = {"actor": {"dp": 2}, "critic": {"dp": 2}}
    plan = make_plan(RLHFJobSpec.model_validate(document))
    assert {layout.dp for layout in plan.dedicated.values()} == {1}
    assert not any(row.zero3 for row in plan.batching)
    assert "spec.plan.zero3 is Always, which has no effect: no trained model has data-parallel ranks" in plan.warnings


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

    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.2)
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
