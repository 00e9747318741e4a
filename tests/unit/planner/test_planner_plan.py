"""The simplest plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.schedules.step_commands import serial_1f1b
from dovetail.manifest.sizes import trained_models, world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.protocol.plan import Plan
from helpers.lockstep import hung
from helpers.plain import plain_spec


def spec(trainers=2, rollouts=2, **changes) -> RLHFJobSpec:
    return plain_spec(trainers, rollouts, **changes)


def test_auto_is_data_parallel_over_all_ranks():
    plan = make_plan(spec(trainers=4))
    assert plan.world_size == 4
    assert plan.parallelism == dict.fromkeys(["actor", "critic", "reward"], Parallelism(dp=4))
    assert [t.name for t in plan.trainers] == ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]
    assert [(r.name, r.group) for r in plan.rollouts] == [("r-0", "r"), ("r-1", "r")]
    assert plan.warnings == []


def test_auto_falls_back_to_pipeline_stages_where_batches_are_too_small_and_says_so():
    plan = make_plan(spec(trainers=4, ppo={"miniBatchSize": 16, "microBatchSize": 8}))
    assert plan.parallelism["actor"] == Parallelism(pp=2, dp=2)
    assert plan.parallelism["reward"] == Parallelism(dp=4)
    assert "the actor is split into 2 pipeline stages" in plan.warnings[0]


def test_no_layout_within_the_layers_is_refused_with_the_number():
    tight = spec(trainers=4, ppo={"miniBatchSize": 16, "microBatchSize": 16})
    assert make_plan(tight).parallelism["actor"] == Parallelism(pp=4)
    with pytest.raises(PlanError, match=r"spec.ppo.miniBatchSize is 16.*on 4 data-parallel ranks.*multiple of 64"):
        make_plan(tight, layers={"actor": 3})


def test_more_ranks_than_a_layout_can_have_are_refused_in_one_sentence():
    sizes = {"t": ("trainer", 4096), "more": ("trainer", 1), "r": ("rollout", 1)}
    groups = [{"name": name, "roles": [role], "replicas": count} for name, (role, count) in sizes.items()]
    with pytest.raises(PlanError, match=r"spec.groups has 4097 trainer ranks, and at most 4096 can be planned; lower"):
        make_plan(spec(groups=groups))


def test_pins_are_respected_and_the_reward_model_follows_the_critic():
    pins = {"parallelism": {"actor": {"pp": 2, "dp": 1}, "critic": {"pp": 1, "dp": 2}}}
    plan = make_plan(spec(plan=pins))
    assert plan.parallelism["actor"] == Parallelism(pp=2)
    assert plan.parallelism["critic"] == plan.parallelism["reward"] == Parallelism(dp=2)


def test_more_stages_than_layers_are_refused():
    pins = {"parallelism": {"actor": {"pp": 2}}}
    with pytest.raises(PlanError, match="has only 1 layers"):
        make_plan(spec(plan=pins), layers={"actor": 1})


def test_ranks_are_counted_over_groups_and_gpus():
    groups = [
        {"name": "a", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2}, "replicas": 1},
        {"name": "b", "roles": ["trainer", "rollout"], "gpu": {"product": "NVIDIA-A10", "perPod": 1}, "replicas": 2},
        {"name": "c", "roles": ["rollout"], "minReplicas": 1, "maxReplicas": 5},
    ]
    plan = make_plan(spec(groups=groups))
    assert [(t.rank, t.group) for t in plan.trainers] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert [r.name for r in plan.rollouts] == ["b-0", "b-1", "c-0"]


def test_stages_decide_models_tasks_and_rollouts():
    plan = make_plan(spec(stages=["sft"]))
    assert set(plan.parallelism) == {"actor"}
    assert plan.rollouts == []
    assert [t.task for t in plan.tasks] == ["sft"]
    grpo = make_plan(spec(stages=["sft", "reward", "ppo"], ppo={"advantage": "grpo", "samplesPerPrompt": 4}))
    assert "critic" not in grpo.parallelism
    assert not {"critic", "critic_training"} & {t.task for t in grpo.tasks}


def test_a_plan_survives_the_file():
    plan = make_plan(spec())
    text = plan.model_dump_json(by_alias=True)
    assert '"worldSize":2' in text
    assert Plan.model_validate_json(text) == plan


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["gae", "rloo"]))
def test_any_plan_covers_the_world_and_its_schedule_runs(trainers, micro, sft, mini, advantage):
    job = spec(
        trainers=trainers,
        sft={"batchSize": sft * micro, "microBatchSize": micro},
        ppo={
            "globalBatchSize": 2 * mini * micro,
            "samplesPerPrompt": 2,
            "miniBatchSize": mini * micro,
            "microBatchSize": micro,
            "advantage": advantage,
        },
        reward={"batchSize": micro, "microBatchSize": micro},
    )
    plan = make_plan(job)
    assert make_plan(job) == plan
    assert set(plan.parallelism) == set(trained_models(job))
    assert {world_size(layout) for layout in plan.parallelism.values()} == {trainers}
    for stage in job.stages:
        parts = [b for b in plan.batching if b.stage is stage]
        counts = {b.model: b.micro_batches for b in parts}
        for b in parts:
            assert b.micro_batches * b.micro_batch_size * plan.parallelism[b.model].dp == b.mini_batch_size
        layouts = {name: plan.parallelism[name] for name in counts}
        assert not hung(serial_1f1b(layouts, counts, list(counts)), layouts, receives_ahead=1)
