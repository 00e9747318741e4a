"""Plans whose ranks share the tokens of sequences: pinned, and chosen for long responses."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.documents import parse
from dovetail.manifest.types import Dtype, Parallelism, RLHFJobSpec
from dovetail.planner.candidate import Share
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.memory import training_job, training_memory
from dovetail.planner.placements import fragment, recommend
from dovetail.planner.planned_job import PlannedJob
from dovetail.planner.search import context_degrees
from dovetail.planner.seconds import pass_seconds
from dovetail.protocol.plan import Layout, divisions
from helpers.manifests import changed

H100 = "NVIDIA-H100-80GB-HBM3"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EIGHT_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}


def spec(config: dict[str, Any] = SMALL, architecture: str = "llama", **changes: Any) -> RLHFJobSpec:
    source = {"scratch": {"architecture": architecture, "config": config}}
    return parse(changed(**{"models.actor.source": source, **changes})).spec


def pinned(layout: dict[str, int], replicas: int, config: dict[str, Any] = SMALL, **changes: Any) -> RLHFJobSpec:
    return spec(config, **{"plan.parallelism": {"actor": layout}, "groups.0.replicas": replicas, **changes})


def test_a_pinned_degree_divides_the_batch_among_groups_of_ranks() -> None:
    batch = {"ppo.microBatchSize": 16}
    plan = make_plan(pinned({"dp": 4, "cp": 2}, 4, **batch))
    assert plan.parallelism["critic"] == Parallelism(dp=4, cp=2)
    rows = {row.model: row for row in plan.batching if row.stage == "ppo"}
    assert rows["actor"].micro_batches == rows["actor"].mini_batch_size // (2 * 16)
    assert type(plan).model_validate_json(plan.model_dump_json(by_alias=True)) == plan


def test_earlier_releases_can_read_layouts_without_it() -> None:
    assert set(Parallelism(dp=2).model_dump()) == {"pp", "tp", "dp"}
    assert set(Layout(dp=2, cp=2, loop=True, chunks=2).model_dump()) >= {"cp", "loop"}
    assert not {"cp", "loop"} & set(Layout(dp=2).model_dump(by_alias=True))
    with pytest.raises(ValueError, match="cp 4 does not divide the 2 dp ranks of a pipeline"):
        Layout(dp=4, pipelines=2, cp=4)


@pytest.mark.parametrize(
    ("heads", "layout", "why"),
    [
        ({"num_attention_heads": 6, "hidden_size": 48}, {"dp": 4, "cp": 4}, "which does not divide its 6 attention"),
        (
            {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 6},
            {"dp": 4, "cp": 4},
            "its 6 key heads",
        ),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, {"tp": 2, "dp": 4, "cp": 4}, "its 2 attention heads"),
    ],
)
def test_a_degree_that_does_not_divide_the_heads_is_refused(heads: dict[str, int], layout: Any, why: str) -> None:
    found = pinned(layout, 4 * layout.get("tp", 1), SMALL | heads)
    with pytest.raises(PlanError, match=f"spec.plan.parallelism.actor.cp is 4, which .*{why.removeprefix('which ')}"):
        make_plan(found)


def test_few_key_heads_are_repeated() -> None:
    make_plan(pinned({"dp": 4, "cp": 4}, 4, SMALL | {"num_key_value_heads": 2}))


def test_ranks_of_their_own_keep_it() -> None:
    parts = divisions({"actor": Parallelism(dp=4, cp=2), "critic": Parallelism(dp=4, cp=2)}, 8)
    assert parts
    assert all(layout.cp == 2 and layout.dp % 2 == 0 for part in parts for layout in part.values())


def test_a_rank_holds_and_computes_its_part_of_the_tokens() -> None:
    job = PlannedJob(spec(EIGHT_BILLION, "qwen3"))
    rule = next(rule for rule in job.rules if rule.stage == "ppo" and rule.model == "actor")
    _, work = job.mini_batch(rule)
    pool = Pool("h100", gpu(H100), 1, 8)
    held, times = [], []
    for cp in (1, 8):
        share = Share("h100", dp=8, cp=cp, micro_batch=8, fsdp=2)
        held.append(training_memory(training_job(work, "actor_training", share, Dtype.BFLOAT16), 0).device)
        times.append(pass_seconds(*work.needed("actor_training"), share, pool, 32768.0, 16384.0)[0])
    assert held[1]["activations"] == pytest.approx(held[0]["activations"] / 8, rel=1e-3)
    assert held[1]["weights"] == held[0]["weights"]
    assert "exchanged heads" in held[1]
    assert times[0] / 8 < times[1] < times[0] / 7


def test_it_is_tried_for_long_samples_alone() -> None:
    shape = PlannedJob(spec(EIGHT_BILLION, "qwen3")).shape("actor")
    assert context_degrees(shape, 32767)(1) == [1]
    assert context_degrees(shape, 32768)(1) == [1, 2, 4, 8, 16]
    assert context_degrees(shape, 32768)(8) == [1, 2, 4]
    assert context_degrees(shape, 8, {4})(1) == [4]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "shared"), [(2048, False), (63488, True), (129024, True)])
def test_eight_gpus_train_eight_billion_parameters_on_long_responses(tokens: int, shared: bool) -> None:
    fields: dict[str, Any] = {
        "generation.maxTokens": tokens,
        "data.maxPromptTokens": 2048,
        "stages": ["ppo"],
        "ppo.advantage": "grpo",
        "models.reward": {"function": "m:score"},
    }
    chosen = recommend(spec(EIGHT_BILLION, "qwen3", **fields), {}, Inventory((Pool("h100", gpu(H100), 1, 8),)))
    (share,) = chosen.candidate.actor_training
    assert (share.cp > 1) is shared
    assert fragment(chosen)["plan"]["parallelism"]["actor"].get("cp", 1) == share.cp
