"""Plans whose ranks divide the experts of each layer, as a manifest asks for."""

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
from dovetail.planner.seconds import pass_seconds
from dovetail.protocol.plan import Layout, divisions
from helpers.manifests import changed

POOL = Pool("h100", gpu("NVIDIA-H100-80GB-HBM3"), 1, 8)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
THIRTY_BILLION = {  # of Qwen3-30B-A3B
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def spec(config: dict[str, Any] = SMALL, **changes: Any) -> RLHFJobSpec:
    source = {"scratch": {"architecture": "qwen3_moe", "config": config}}
    return parse(changed(**{"models.actor.source": source, **changes})).spec


def pinned(layout: dict[str, int], config: dict[str, Any] = SMALL, **changes: Any) -> RLHFJobSpec:
    return spec(config, **{"plan.parallelism": {"actor": layout}, "groups.0.replicas": 4, **changes})


def test_a_given_degree_is_kept() -> None:
    plan = make_plan(pinned({"dp": 4, "ep": 2}, **{"ppo.microBatchSize": 16}))
    assert plan.parallelism["actor"] == plan.parallelism["critic"] == Parallelism(dp=4, ep=2)
    rows = {row.model: row for row in plan.batching if row.stage == "ppo"}
    assert rows["actor"].micro_batches == rows["actor"].mini_batch_size // (4 * 16), "the batch is divided as without"
    assert type(plan).model_validate_json(plan.model_dump_json(by_alias=True)) == plan


def test_earlier_releases_can_read_layouts_without_it() -> None:
    assert set(Parallelism(dp=2).model_dump()) == {"pp", "tp", "dp"}
    assert Layout(dp=2, ep=2).model_dump()["ep"] == 2
    with pytest.raises(ValueError, match="ep 4 does not divide the 2 dp ranks of a pipeline"):
        Layout(dp=4, pipelines=2, ep=4)


def test_a_degree_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(PlanError, match=r"actor\.ep is 4, which does not divide the 6 experts of a layer; use an ep"):
        make_plan(pinned({"dp": 4, "ep": 4}, SMALL | {"num_experts": 6}))
    dense = {"scratch": {"architecture": "llama", "config": {"num_hidden_layers": 2, "hidden_size": 32}}}
    with pytest.raises(PlanError, match="ep is 2, but layers of llama models have no experts that ranks can divide"):
        make_plan(pinned({"dp": 4, "ep": 2}, **{"models.actor.source": dense}))


def test_ranks_of_their_own_keep_it() -> None:
    parts = divisions({"actor": Parallelism(dp=4, ep=2), "critic": Parallelism(dp=4, ep=2)}, 8)
    assert parts
    assert all(layout.ep == 2 and layout.dp % 2 == 0 for part in parts for layout in part.values())


def test_a_rank_gathers_its_own_experts_and_sends_tokens() -> None:
    job = PlannedJob(spec(THIRTY_BILLION))
    rule = next(rule for rule in job.rules if rule.stage == "ppo" and rule.model == "actor")
    _, work = job.mini_batch(rule)
    held, times = [], []
    for ep in (1, 8):
        share = Share("h100", dp=8, ep=ep, micro_batch=1, fsdp=2)
        held.append(training_memory(training_job(work, "actor_training", share, Dtype.BFLOAT16), 0).device)
        times.append(pass_seconds(*work.needed("actor_training"), share, POOL, 4096.0, 2048.0)[0])
    shape, _ = work.needed("actor_training")
    experts = 48 * 128 * 3 * 2048 * 768
    assert held[0]["gathered weights"] - held[1]["gathered weights"] == pytest.approx(2 * experts * 7 / 8, rel=1e-3)
    for part in ("weights", "optimizer", "activations"):
        assert held[1][part] == pytest.approx(held[0][part], rel=1e-6), part
    assert held[1]["gradients"] < held[0]["gradients"] / 3
    assert (
        held[1]["exchanged tokens"]
        == 2 * 2 * 8 * 2048 * training_job(work, "actor_training", share, Dtype.BFLOAT16).tokens
    )
    assert times[1] > times[0]
    assert shape.parameters() - shape.parameters(ep=8) == pytest.approx(experts * 7 / 8)


def test_whole_copies_hold_the_own_experts_alone() -> None:
    job = PlannedJob(spec())
    rule = next(rule for rule in job.rules if rule.stage == "ppo" and rule.model == "actor")
    _, work = job.mini_batch(rule)
    held = [
        training_memory(training_job(work, "actor_training", Share("", dp=4, ep=ep), Dtype.FLOAT32), 0).device
        for ep in (1, 4)
    ]
    experts = 4 * 2 * 4 * 3 * 32 * 24
    for part, copies in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        assert held[0][part] - held[1][part] == copies * experts * 3 / 4


@pytest.mark.slow
def test_eight_gpus_keep_what_the_manifest_asks_for() -> None:
    fields: dict[str, Any] = {
        "stages": ["ppo"],
        "ppo.advantage": "grpo",
        "models.reward": {"function": "m:score"},
        "plan.parallelism": {"actor": {"dp": 8, "ep": 4}},
    }
    chosen = recommend(spec(THIRTY_BILLION, **fields), {}, Inventory((POOL,)))
    (share,) = chosen.candidate.actor_training
    assert (share.dp, share.ep) == (8, 4)
    assert fragment(chosen)["plan"]["parallelism"]["actor"]["ep"] == 4
