"""Plans whose training splits layers over ranks: pinned on CPUs, chosen on GPUs, refused where a model cannot."""

from typing import Any

import pytest

from dovetail.coordinator.schedules.step_commands import serial_1f1b
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.checks.validation import warnings
from dovetail.manifest.documents import parse
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.candidate import Candidate
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placements import fragment, recommend
from helpers.manifests import changed

A100 = "NVIDIA-A100-SXM4-80GB"
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Of 30 billion parameters: a stage of the actor's fits on no GPU with ZeRO-2 alone where there are few.
LARGE = {
    "hidden_size": 6656,
    "intermediate_size": 17920,
    "num_hidden_layers": 60,
    "num_attention_heads": 52,
    "num_key_value_heads": 52,
}


def spec(config: dict[str, int] = CONFIG, architecture: str = "llama", **changes: Any) -> RLHFJobSpec:
    """With pins and other `changes` by dotted path."""
    source = {"scratch": {"architecture": architecture, "config": config}}
    return parse(changed(**{"models.actor.source": source, **changes})).spec


def pinned(**layouts: dict[str, int]) -> dict[str, Any]:
    return {"plan.parallelism": layouts}


def test_a_pinned_degree_is_planned_without_a_warning() -> None:
    found = spec(**pinned(actor={"pp": 2, "tp": 2}), **{"groups.0.replicas": 4})
    plan = make_plan(found)
    assert plan.parallelism == dict.fromkeys(["actor", "critic", "reward"], Parallelism(pp=2, tp=2))
    assert not [each for each in warnings(found) if "parallelism" in each]
    counts = dict.fromkeys(["actor", "critic"], 3)
    lists = serial_1f1b({name: plan.parallelism[name] for name in counts}, counts, list(counts), plan.world_size)
    assert lists[0] == lists[1] != lists[2] == lists[3]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads, 1"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40}, "num_attention_heads, 5"),
        ({"intermediate_size": 47}, "intermediate_size, 47"),
    ],
)
def test_a_degree_that_does_not_divide_the_model_is_refused(change: dict[str, int], why: str) -> None:
    with pytest.raises(PlanError, match=f"actor.tp is 2, which does not divide its {why} of the actor; use a tp that"):
        make_plan(spec(CONFIG | change, **pinned(actor={"tp": 2})))


def test_norms_with_weights_for_each_head_are_not_shared() -> None:
    """Command R+: ranks would hold the norms of all heads, and only some of the heads."""
    for normed, layout in ((True, {"pp": 2}), (False, {"tp": 2})):
        make_plan(spec(CONFIG | {"use_qk_norm": normed}, "cohere", **pinned(actor=layout)))
    with pytest.raises(PlanError, match=r"layers of cohere models with use_qk_norm, .* set tp to 1"):
        make_plan(spec(CONFIG | {"use_qk_norm": True}, "cohere", **pinned(actor={"tp": 2})))


def trained(candidate: Candidate) -> list[int]:
    return [share.tp for share in (*candidate.actor_training, *candidate.critic_training)]


@pytest.mark.slow
def test_where_stages_alone_do_not_fit_layers_are_split_and_the_fragment_plans_the_same() -> None:
    job = spec(LARGE)
    chosen = recommend(job, {}, Inventory((Pool("a100", gpu(A100), 4, 8),)))
    degrees = trained(chosen.candidate)
    assert degrees[0] > 1
    assert degrees[0] == degrees[1]
    found = fragment(chosen)
    assert found["plan"]["parallelism"]["actor"]["tp"] == degrees[0]


@pytest.mark.slow
def test_adapters_with_dropout_are_not_split() -> None:
    dropping = {"rank": 8, "dropout": 0.1}
    lora = {"models.actor.lora": dropping, "models.critic.lora": dropping}
    chosen = recommend(spec(LARGE, **lora), {}, Inventory((Pool("a100", gpu(A100), 4, 8),)))
    assert set(trained(chosen.candidate)) == {1}
