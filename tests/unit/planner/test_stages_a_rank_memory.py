"""Memory of jobs whose schedules may put several stages of a model on a trainer rank: the first and the last stage are
then on one rank, with the embedding and the head."""

from __future__ import annotations

from typing import Any

import pytest
from test_recompute_plan import A100, on_cpus

from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.plan import Plan

# As many words as 3 layers of an 8B model have weights.
WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def on_shared_gpus(**plan: Any) -> Plan:
    """Pods that train in 4 stages and generate."""
    document = {
        "stages": ["ppo"],
        "models": {
            "actor": {"source": {"scratch": {"architecture": "llama", "config": WIDE}}},
            "reward": {"function": "rewards:score"},
            "tokenizer": {"train": {"vocabSize": 128000}},
        },
        "data": {"maxTokens": 1024, "maxPromptTokens": 512},
        "ppo": {"globalBatchSize": 128, "miniBatchSize": 128, "microBatchSize": 1},
        "generation": {"maxTokens": 512},
        "groups": [
            {"name": "both", "roles": ["trainer", "rollout"], "gpu": {"product": A100, "perPod": 1}, "replicas": 4}
        ],
        "plan": {"parallelism": {"actor": {"pp": 4}}} | plan,
    }
    return make_plan(RLHFJobSpec.model_validate(document))


def share(plan: Plan) -> float:
    """The part of a GPU that a server takes."""
    (found,) = {rollout.memory for rollout in plan.rollouts}
    assert found is not None
    return found


def test_servers_leave_trainers_room_for_whichever_number_of_stages_they_take() -> None:
    found, pinned = on_shared_gpus(), on_shared_gpus(intraStageFusion="VShaped")
    assert found.chunks > 1
    one = share(on_shared_gpus(intraStageFusion="Fused"))
    assert share(pinned) < one - 0.02, "a rank has both the embedding and the head"
    assert share(found) <= share(pinned)


@pytest.mark.parametrize("vocabulary", [512, 65536])
def test_pods_ask_for_whichever_number_of_stages_they_take(vocabulary: int) -> None:
    def trainer(way: str) -> tuple[int, float]:
        document = on_cpus(intraStageFusion=way).model_dump(mode="json", by_alias=True)
        document["models"]["tokenizer"] = {"train": {"vocabSize": vocabulary}}
        plan = make_plan(RLHFJobSpec.model_validate(document))
        return plan.chunks, plan.memory[0].used

    chunks, found = trainer("Auto")
    two, pinned = trainer("VShaped")
    _, one = trainer("Fused")
    assert (chunks, two) == (2, 2)
    assert found == max(pinned, one)
    if vocabulary > 512:
        assert pinned > one, "a rank has both the embedding and the head"
