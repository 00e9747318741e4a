"""Jobs in which nothing reads the reference: no scorer holds it, and neither memory nor time is planned for it."""

from __future__ import annotations

from typing import Any

import pytest
from test_placement_job import spec

from dovetail.manifest.checks.validation import warnings
from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.candidate import scorer_models
from dovetail.planner.make_plan import make_plan
from helpers.plain import plain_spec

GROUPED = {"advantage": "grpo", "samplesPerPrompt": 4}
FUNCTION = {"reward": {"function": "dovetail.coordinator.rewards.nothing:zero"}}


def without(changed: RLHFJobSpec) -> RLHFJobSpec:
    kl = changed.ppo.kl.model_copy(update={"coef": 0.0})
    return changed.model_copy(update={"ppo": changed.ppo.model_copy(update={"kl": kl})})


@pytest.mark.parametrize(
    ("ppo", "reads"),
    [
        ({}, True),
        ({"kl": {"coef": 0}}, False),
        ({"kl": {"coef": 0.1, "target": 6.0}}, True),
        ({"kl": {"coef": 0}, "advantage": "distillation"}, True),
        ({"kl": {"coef": 0}, "advantageFunction": "a:b"}, True),
        ({"kl": {"coef": 0}, "loss": "a:b"}, True),
        ({"kl": {"coef": 0}, "loss": "cispo"}, False),
    ],
)
def test_the_reference_is_read_by_the_penalty_a_student_and_functions_of_the_users(
    ppo: dict[str, Any], reads: bool
) -> None:
    assert PPO.model_validate(ppo).reads_reference is reads


def test_scorers_hold_what_is_left() -> None:
    kept = plain_spec(2, 2)
    assert scorer_models(kept, 2) == [["reference", "reward", "critic"]] * 2
    assert scorer_models(without(kept), 2) == [["reward", "critic"]] * 2
    pinned = without(plain_spec(2, 2, plan={"placement": "Interleaving"}))
    assert scorer_models(pinned, 2) == [["reward", "critic"]] * 2, "there is no reference to part from them"
    assert any("Interleaving has no effect" in sentence for sentence in warnings(pinned))
    alone = without(plain_spec(2, 2, models={"actor": {"source": {"huggingFace": "a/b"}}, **FUNCTION}, ppo=GROUPED))
    assert scorer_models(alone, 2) == [[], []]
    plan = make_plan(alone)
    assert {task.task for task in plan.tasks} == {"sft", "generation", "actor_training"}
    assert [rollout.scores for rollout in plan.rollouts] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("models", [{}, FUNCTION], ids=["reward model", "function"])
def test_neither_time_nor_memory_is_planned_for_it(models: dict[str, Any]) -> None:
    pins = {"parallelism": {"actor": {"dp": 4}}}
    one = spec(ppo=GROUPED, models=models, plan=pins)
    before, after = make_plan(one).prediction, make_plan(without(one)).prediction
    assert before is not None
    assert after is not None
    assert {t.task for t in before.tasks} - {t.task for t in after.tasks} == {"reference"}
    assert after.iteration_seconds <= before.iteration_seconds
    weights = [
        sum(size for memory in found.memory for name, size in memory.parts.items() if name.startswith("reference"))
        for found in (before, after)
    ]
    assert weights[0] > 0
    assert weights[1] == 0
    assert all(other.placement != "Interleaving" for other in after.alternatives)
