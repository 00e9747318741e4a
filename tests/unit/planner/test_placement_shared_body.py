"""What the planner makes of a critic on the actor's body."""

import pytest
from test_placement_job import SMALL, spec

from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import Dtype, Parallelism, RLHFJobSpec
from dovetail.planner.candidate import scorer_models
from dovetail.planner.make_plan import make_plan
from dovetail.planner.memory import Training, trained_parameters, training_memory
from helpers.plain import plain_spec

SHARED = {"actor": {"source": {"huggingFace": "a/b"}}, "critic": {"shareActorBody": True}}


def gpu_spec(**changes) -> RLHFJobSpec:
    one = spec(**changes)
    models = one.models.model_copy(update={"critic": one.models.critic.model_copy(update={"share_actor_body": True})})
    return one.model_copy(update={"models": models})


def test_no_task_of_a_critic_is_left():
    plan = make_plan(plain_spec(2, 2, models=SHARED, plan={"parallelism": {"actor": {"pp": 2}}}))
    assert set(plan.parallelism) == {"actor", "reward"}
    assert {task.task for task in plan.tasks}.isdisjoint({"critic", "critic_training"})
    assert plan.schedule == "Auto", "of the actor alone"
    assert plan.warnings == []
    assert all(rollout.scores == ["reference", "reward"] for rollout in plan.rollouts)


def test_interleaving_parts_reference_and_reward():
    pinned = plain_spec(2, 2, models=SHARED, plan={"placement": "Interleaving"})
    assert scorer_models(pinned, 2) == [["reference"], ["reward"]]


def test_prediction_takes_less_memory_and_time_than_two_models():
    pins = {"parallelism": {"actor": {"dp": 4}}}
    separate, shared = make_plan(spec(plan=pins)).prediction, make_plan(gpu_spec(plan=pins)).prediction
    assert separate is not None
    assert shared is not None
    assert {t.task for t in shared.tasks} == {"generation", "reference", "reward", "actor_training"}
    assert shared.iteration_seconds < separate.iteration_seconds
    assert shared.phases["training"] < 0.6 * separate.phases["training"]

    def trainers(found) -> float:
        return max(sum(memory.parts.values()) for memory in found.memory if memory.group == "train")

    assert trainers(shared) < 0.85 * trainers(separate)


def test_values_cost_a_forward_pass_even_where_the_rollouts_log_probs_serve():
    ppo = {"oldLogProbs": "Rollout", "advantage": "grpo", "samplesPerPrompt": 4}
    without = make_plan(spec(ppo=ppo)).prediction
    shared = make_plan(gpu_spec(ppo={"oldLogProbs": "Rollout"})).prediction
    assert without is not None
    assert shared is not None
    assert shared.phases["inference"] > without.phases["inference"]
    assert shared.phases["training"] == pytest.approx(without.phases["training"], rel=1e-3)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_counts_the_value_head_on_the_last_stage(pp, tied):
    config = {"model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": tied} | SMALL
    shape = ModelShape.of(config)
    for stage in range(pp):
        heads = {head: Training(shape, head, Parallelism(pp=pp), Dtype.BFLOAT16, 4096) for head in ("lm", "lm+value")}
        more = trained_parameters(heads["lm+value"], stage)[0] - trained_parameters(heads["lm"], stage)[0]
        assert more == (SMALL["hidden_size"] if stage == pp - 1 else 0)
        logits = [training_memory(job, stage).device.get("logits") for job in heads.values()]
        assert logits[0] == logits[1]
