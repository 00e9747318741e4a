"""Actor and critic with unlike pipelines on the same ranks: the planner counts what the ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_recompute_plan import A100, on_cpus

from dovetail.coordinator.schedules.training_schedule import shared_layouts
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import Dtype, Parallelism, RLHFJobSpec, Stage
from dovetail.planner.candidate import Share, side_by_side
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.memory import Training, communication_bytes, training_memory
from dovetail.protocol.plan import Plan

GIB = 2**30
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}
SHAPE = ModelShape.of({**LLAMA_1B, "model_type": "llama", "vocab_size": 32000})


def on_gpus(actor: dict[str, int] | None, critic: dict[str, int] | None, layers: int = 16, **more: Any) -> RLHFJobSpec:
    """1B on 8 GPUs, with pinned layouts or (None) without."""
    config = LLAMA_1B | {"num_hidden_layers": layers}
    document = {
        "stages": ["reward", "ppo"],
        "models": {
            "actor": {"source": {"scratch": {"architecture": "llama", "config": config}}},
            "tokenizer": {"train": {"vocabSize": 32000}},
        },
        "data": {"maxTokens": 512, "maxPromptTokens": 256},
        "reward": {"batchSize": 64},
        "ppo": {"globalBatchSize": 64, "miniBatchSize": 64, "microBatchSize": 1, **more.pop("ppo", {})},
        "generation": {"maxTokens": 256},
        "groups": [
            {"name": "t", "roles": ["trainer"], "gpu": {"product": A100, "perPod": 8}},
            {"name": "r", "roles": ["rollout"], "gpu": {"product": A100, "perPod": 1}, "replicas": 4},
        ],
        "plan": {**({"parallelism": {"actor": actor, "critic": critic}} if actor else {}), **more},
    }
    return RLHFJobSpec.model_validate(document)


def parts(plan: Plan) -> dict[str, float]:
    assert plan.prediction is not None
    return dict(plan.prediction.memory[0].parts)


@given(
    actor=st.integers(1, 4).map(lambda n: 2**n // 2),
    critic=st.integers(1, 4).map(lambda n: 2**n // 2),
    copies=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2]),
)
def test_shares_have_the_pipelines_that_trainers_make(actor: int, critic: int, copies: int, tp: int) -> None:
    ranks = max(actor, critic) * copies
    layouts = {
        "actor": Parallelism(pp=actor, dp=ranks // actor, tp=tp),
        "critic": Parallelism(pp=critic, dp=ranks // critic, tp=tp),
    }
    formed = shared_layouts(layouts, False)
    shares = (Share("a", pp=each.pp, dp=each.dp, tp=each.tp) for each in layouts.values())
    for share, layout in zip(side_by_side(*shares), formed.values(), strict=True):
        assert share.pipelines == layout.pipelines
        assert share.shards == layout.dp // layout.pipelines == copies


def test_shares_of_other_gpus_or_with_equal_stages_stay_as_they_are() -> None:
    whole, part = Share("a", pp=4, dp=2), Share("a", first=8, dp=8)
    assert side_by_side(whole, part) == (whole, part)
    assert side_by_side(whole, whole) == (whole, whole)


def test_a_critic_beside_a_deeper_pipeline_is_whole_on_each_rank() -> None:
    """8 pipelines of one stage each: nothing is sharded, though there are 8 data-parallel ranks."""
    found = parts(make_plan(on_gpus({"pp": 8, "dp": 1}, {"dp": 8})))
    assert found["critic_training: weights"] == 4 * SHAPE.parameters("value")
    assert found["critic_training: optimizer"] == 8 * SHAPE.parameters("value")
    halves = parts(make_plan(on_gpus({"pp": 4, "dp": 2}, {"dp": 8})))
    assert halves["critic_training: weights"] == 4 * SHAPE.parameters("value") / 2
    alone = parts(make_plan(on_gpus({"dp": 8}, {"dp": 8})))
    assert alone["critic_training: weights"] == 4 * SHAPE.parameters("value") / 8


def test_without_a_schedule_that_both_share_all_ranks_share_the_critic() -> None:
    found = parts(
        make_plan(on_gpus({"pp": 8, "dp": 1}, {"dp": 8}, ppo={"microBatchSize": 1, "microBatchTokens": 1024}))
    )
    assert found["critic_training: weights"] == 4 * SHAPE.parameters("value") / 8


def test_pinned_layouts_that_do_not_fit_so_are_refused() -> None:
    """Counted as an eighth the critic would fit."""
    assert make_plan(on_gpus({"dp": 8}, {"dp": 8}, layers=96))
    with pytest.raises(PlanError, match=r"t\[0:8\] needs [\d.]+ GiB per GPU"):
        make_plan(on_gpus({"pp": 8, "dp": 1}, {"dp": 8}, layers=96))


@given(
    stages=st.sampled_from([(1, 2), (1, 4), (2, 4), (4, 1), (2, 1)]),
    copies=st.sampled_from([1, 2, 4]),
    micro_batches=st.integers(1, 4),
    zero=st.sampled_from([2, 3]),
)
def test_memory_is_that_of_a_pipeline_alone(
    stages: tuple[int, int], copies: int, micro_batches: int, zero: Any
) -> None:
    """Ranks of one pipeline hold what they would hold without the others. All add up their gradients in place."""
    pp, other = stages
    pipelines = max(1, other // pp)
    assume(pipelines > 1)
    fields: dict[str, Any] = {"tokens": 512, "micro_batches": micro_batches, "in_flight": 1, "fsdp": zero}
    if copies == 1:
        fields["fsdp"] = 2
    layout = Parallelism(pp=pp, dp=pipelines * copies)
    beside = Training(SHAPE, "value", layout, Dtype.BFLOAT16, pipelines=pipelines, **fields)
    alone = Training(SHAPE, "value", Parallelism(pp=pp, dp=copies), Dtype.BFLOAT16, **fields)
    found, known = (dict(training_memory(job, 0).device) for job in (beside, alone))
    for name in ("NCCL buffers", "fragments"):
        found.pop(name), known.pop(name)
    assert found == known
    more = communication_bytes(layout, 1, pipelines) - communication_bytes(alone.layout)
    assert more >= 0


def test_zero3_is_not_said_of_a_model_that_nobody_shares() -> None:
    """The critic has 2 data-parallel ranks, of 2 pipelines."""
    spec = on_cpus(zero3="Always", parallelism={"actor": {"pp": 2}, "critic": {"dp": 2}})
    rows = {(row.stage, row.model): row.zero3 for row in make_plan(spec).batching}
    assert rows[Stage.PPO, "critic"] is False
    assert rows[Stage.PPO, "actor"] is False
    four = spec.model_dump(mode="json", by_alias=True)
    four["groups"][0]["replicas"] = 4
    four["plan"]["parallelism"] = {"actor": {"pp": 2, "dp": 2}, "critic": {"dp": 4}}
    rows = {(row.stage, row.model): row.zero3 for row in make_plan(RLHFJobSpec.model_validate(four)).batching}
    assert rows[Stage.PPO, "critic"] is True


@pytest.mark.slow
def test_the_search_takes_equal_stages_where_unlike_ones_do_not_fit() -> None:
    """Whatever it finds fits, counted as trainers hold it."""
    for layers in (16, 48, 80):
        plan = make_plan(on_gpus(None, None, layers=layers))
        assert plan.prediction is not None
        for memory in plan.prediction.memory:
            assert sum(memory.parts.values()) <= memory.capacity
