"""Memory of pods on CPUs: by hand, monotone, and what a podTemplate allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.checks.pod_templates import memory_limit, quantity
from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.cpus import PROCESS_BYTES, SERVER_BYTES, pod_memory
from dovetail.planner.make_plan import make_plan
from dovetail.planner.planned_job import Placed, PlannedJob
from dovetail.protocol.budgets import KV_BLOCK_TOKENS
from dovetail.protocol.prediction import GIB, too_small

SPEC = load_manifest(Path(__file__).parents[3] / "examples" / "quickstart.yaml").spec
ALONE = Placed({"actor": Parallelism(), "critic": Parallelism()})


def changed(**sections: dict[str, Any]) -> RLHFJobSpec:
    """The quickstart's spec with these fields (as in a manifest) in its sections."""
    document = SPEC.model_dump(mode="json", by_alias=True)
    for name, fields in sections.items():
        document[name] |= fields
    return RLHFJobSpec.model_validate(document)


def with_groups(*groups: dict[str, Any], placement: str = "Auto") -> RLHFJobSpec:
    document = SPEC.model_dump(mode="json", by_alias=True)
    document["groups"] = list(groups)
    document["plan"] |= {"parallelism": "Auto", "placement": placement}
    return RLHFJobSpec.model_validate(document)


def template(**resources: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "dovetail", "resources": resources}]}}


def test_the_quickstarts_pods_by_hand() -> None:
    """Weights, moments and gradients are 16 bytes a trained parameter on one rank; a rollout's KV cache has room for
    64 sequences of 192 tokens, which are two blocks."""
    trainer, rollout = (each.parts for each in pod_memory(PlannedJob(SPEC), ALONE, "Serial"))
    block = 4 * 128 * 128 + 3 * 128 * 384 + 2 * 128
    body = 2 * block + 512 * 128 + 128
    for model, head in (("actor", 512 * 128), ("critic", 128)):
        assert trainer[f"{model}_training: weights"] == 4 * (body + head)
        assert trainer[f"{model}_training: gradients"] == 4 * (body + head)
        assert trainer[f"{model}_training: optimizer"] == 8 * (body + head)
    assert trainer["trainer: process"] == PROCESS_BYTES
    assert rollout["generation: processes"] == SERVER_BYTES
    assert rollout["generation: KV cache"] == 64 * 2 * KV_BLOCK_TOKENS * 2 * 2 * 128 * 4
    assert rollout["generation: weights"] == 4 * (body + 512 * 128)
    assert rollout["scorer: weights"] == 4 * (3 * body + 512 * 128 + 2 * 128)
    assert rollout["scorer: process"] == PROCESS_BYTES


@pytest.mark.parametrize(("lag", "versions"), [(0, 0), (1, 2), (3, 4)])
def test_versions_that_are_kept_to_be_sent_take_memory(lag: int, versions: int) -> None:
    trainer = pod_memory(PlannedJob(changed(ppo={"lag": lag})), ALONE, "Serial")[0].parts
    for model in ("actor_training", "critic_training"):
        assert trainer.get(f"{model}: kept versions", 0.0) == versions * trainer[f"{model}: weights"]


def test_a_rollout_keeps_what_it_received_unless_it_is_the_only_one() -> None:
    def copy(**pods: int) -> tuple[float, float]:
        trainers, rollouts = {"name": "t", "roles": ["trainer"]}, {"name": "r", "roles": ["rollout"]}
        parts = pod_memory(PlannedJob(with_groups(trainers, rollouts | {"dtype": "bfloat16"} | pods)), ALONE, "Serial")[
            -1
        ].parts
        return parts.get("generation: received copy", 0.0), parts["generation: weights"]

    assert copy(replicas=1)[0] == 0
    for pods in ({"replicas": 2}, {"maxReplicas": 2}):
        kept, weights = copy(**pods)
        assert kept == 2 * weights, "float32, as it may come"


def test_models_take_turns_with_activations_unless_a_schedule_runs_both() -> None:
    halves = Placed({"actor": Parallelism(pp=2), "critic": Parallelism(pp=2)})

    def activations(schedule: str) -> set[str]:
        return {
            name for name in pod_memory(PlannedJob(SPEC), halves, schedule)[0].parts if name.endswith("activations")
        }

    assert len(activations("Serial")) == 1
    assert activations("Fused") == {"actor_training: activations", "critic_training: activations"}


def test_pods_of_both_roles_hold_everything_and_scorers_only_their_models() -> None:
    both = {"name": "pods", "roles": ["trainer", "rollout"], "replicas": 2}
    (pods,) = pod_memory(PlannedJob(with_groups(both)), ALONE, "Serial")
    assert (pods.first, pods.pods) == (0, 2)
    assert {"trainer: process", "generation: processes", "scorer: process"} <= set(pods.parts)
    apart = [{"name": "t", "roles": ["trainer"]}, {"name": "r", "roles": ["rollout"], "replicas": 4}]
    _, first, second = pod_memory(PlannedJob(with_groups(*apart, placement="Interleaving")), ALONE, "Serial")
    assert [(each.first, each.pods) for each in (first, second)] == [(0, 2), (2, 2)]
    whole = pod_memory(PlannedJob(with_groups(*apart)), ALONE, "Serial")[1]
    held = sum(each.parts["scorer: weights"] for each in (first, second))
    assert held == pytest.approx(whole.parts["scorer: weights"])


def test_nothing_is_said_of_gpus_and_of_jobs_without_ppo() -> None:
    gpus = {"name": "t", "roles": ["trainer", "rollout"], "gpu": {"product": "NVIDIA-A10", "perPod": 1}}
    assert pod_memory(PlannedJob(with_groups(gpus)), ALONE, "Serial") == []
    assert pod_memory(PlannedJob(SPEC.model_copy(update={"stages": SPEC.stages[:1]})), ALONE, "Serial") == []


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(8, 128), micro=st.sampled_from([1, 2, 4, 8]), slots=st.integers(1, 64), more=st.integers(1, 128)
)
def test_memory_grows_with_lengths_micro_batches_and_slots(tokens: int, micro: int, slots: int, more: int) -> None:
    def used(tokens: int, micro: int, slots: int) -> list[float]:
        made = changed(
            generation={"maxTokens": tokens, "maxConcurrent": slots},
            ppo={"microBatchSize": micro, "globalBatchSize": 64, "miniBatchSize": 64},
        )
        return [each.used for each in pod_memory(PlannedJob(made), ALONE, "Serial")]

    trainer, rollout = used(tokens, micro, slots)
    assert used(tokens + more, micro, slots)[0] > trainer
    assert used(tokens, 2 * micro, slots)[0] > trainer
    assert used(tokens + more, micro, slots)[1] >= rollout
    assert used(tokens, micro, slots + 1)[1] > rollout


def test_a_pod_with_too_little_memory_is_warned_of_in_one_sentence() -> None:
    small, enough = template(limits={"memory": "512Mi"}), template(limits={"memory": "64Gi"})
    groups = [
        {"name": "trainers", "roles": ["trainer"], "podTemplate": small},
        {"name": "rollouts", "roles": ["rollout"], "replicas": 2, "podTemplate": enough},
    ]
    made = make_plan(with_groups(*groups))
    (warning,) = too_small(made.memory, {"trainers": small, "rollouts": enough})
    need = made.memory[0].used / GIB
    assert f"group trainers is expected to need {need:.3g} GiB" in warning
    assert "resources.limits.memory of its podTemplates is 0.5 GiB; raise it" in warning
    assert not list(too_small(made.memory, {"trainers": {}, "rollouts": enough}))


def test_a_limit_goes_before_a_request_and_other_containers_do_not_count() -> None:
    found = memory_limit(template(requests={"memory": "1Gi"}, limits={"memory": "2G", "cpu": "1"}))
    assert found is not None
    assert (found.name, found.size) == ("resources.limits.memory", 2e9)
    found = memory_limit(template(requests={"memory": "1Gi"}, limits={"cpu": "1"}))
    assert found is not None
    assert (found.name, found.size) == ("resources.requests.memory", GIB)
    assert memory_limit({"spec": {"containers": [{"name": "other", "resources": {"limits": {"memory": "1"}}}]}}) is None
    for broken in (
        {},
        {"spec": 1},
        {"spec": {"containers": {}}},
        template(limits=None),
        template(limits={"memory": []}),
    ):
        assert memory_limit(broken) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("128974848", 128974848),
        ("129e6", 129e6),
        ("129M", 129e6),
        ("128974848000m", 128974848),
        ("123Mi", 123 * 2**20),
        (".5Gi", GIB / 2),
        (1024, 1024),
        ("1.5k", 1500),
        ("1 Gi", None),
        ("Gi", None),
        ("1K", None),
        ("-1", None),
        (True, None),
        (None, None),
    ],
)
def test_quantities_are_those_of_kubernetes(text: Any, size: float | None) -> None:
    assert quantity(text) == size
