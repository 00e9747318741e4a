"""Context-parallel ranks over Gloo: layers of many families compute what one rank computes, and so do training,
checkpoints and exports. Nightly with four and eight ranks, and with all families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_tensor_parallel import AFTER_MORE_STEPS, assert_close, assert_same_numbers, assert_trained_alike, merged

from dovetail.manifest.model_families import MODEL_FAMILIES
from helpers import nightly
from helpers.family_models import FAMILIES
from helpers.rank_workers import results_of

WORKER = Path(__file__).with_name("context_parallel_worker.py")
pytestmark = pytest.mark.slow
# The ranks, and the number of the worker's layout of so many.
LAYOUTS = [
    (2, 0),
    (2, 1),
    *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((4, 0), (4, 1), (4, 2), (8, 0))),
]
PACKED = [kind for kind, family in MODEL_FAMILIES.items() if family.packs]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("context-parallel")
    ran = [("training", 1, 0), ("training", 2, 0), ("training", 2, 1), ("families", 4, 0)]
    if nightly.asked(request):
        ran += [("training", 4, 0), ("training", 4, 1), ("training", 4, 2), ("training", 8, 0), ("every_family", 4, 0)]
    return results_of(WORKER, folder, ran)


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        *(("families", kind) for kind in FAMILIES),
        *(pytest.param("every_family", kind, marks=pytest.mark.nightly) for kind in PACKED),
    ],
)
def test_passes_equal_the_whole_model_s(results: dict[str, list[Any]], scenario: str, kind: str) -> None:
    for rank in results[f"{scenario} 4 0"]:
        assert set(rank[kind]) == {2, 4}
        assert max(rank[kind].values()) < 1e-5


@pytest.mark.parametrize(("world", "case"), LAYOUTS)
def test_training_equals_one_rank(results: dict[str, list[Any]], world: int, case: int) -> None:
    reference = results["training 1 0"][0]
    ranks = results[f"training {world} {case}"]
    assert_trained_alike(ranks, reference)
    for rank in ranks:
        if "halves" in rank:
            halves = {f"{model}/{name}": t for model, named in rank["halves"].items() for name, t in named.items()}
            assert_close(halves, {name: merged([rank], "at_two")[name] for name in halves})


@pytest.mark.parametrize("what", ["both heads", "experts"])
def test_values_and_balanced_experts_train_as_on_one_rank(results: dict[str, list[Any]], what: str) -> None:
    reference = results["training 1 0"][0][what]
    assert ("router_aux_loss" in reference["log"][0]["stats"]["actor"]) is (what == "experts")
    for rank in results["training 2 0"] + results["training 2 1"]:
        assert_close(merged([rank[what]], "at_two"), merged([reference], "at_two"))
        assert_same_numbers(rank[what]["log"], reference["log"])


def test_adapters_train_as_on_one_rank(results: dict[str, list[Any]]) -> None:
    reference = results["training 1 0"][0]["adapters"]
    start, end = (merged([reference], which) for which in ("start", "end"))
    learnt = {name.rpartition("layers.0.")[2] for name in end if (end[name] - start[name]).abs().max() > 1e-3}
    assert {"self_attn.o_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= learnt
    for rank in results["training 2 0"] + results["training 2 1"]:
        assert_close(merged([rank["adapters"]], "end"), end, AFTER_MORE_STEPS)
        assert_same_numbers(rank["adapters"]["log"], reference["log"])
        assert rank["adapters"]["base_is_frozen"]
        assert rank["adapters"]["replay_is_exact_0.0"]


def test_forward_passes_and_replays_are_as_on_one_rank(results: dict[str, list[Any]]) -> None:
    for mine in results["training 2 0"] + results["training 2 1"]:
        for a, b in zip(mine["read"], results["training 1 0"][0]["read"], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert mine["replay_is_exact"]
        assert mine["recompute_is_exact"]
        assert mine["schedule_is_free"]


def test_what_cannot_be_shared_is_refused(results: dict[str, list[Any]]) -> None:
    for rank in results["training 2 0"]:
        assert "cp is 2, which does not divide its 3 attention heads" in rank["refused"]["heads"]
        assert "need whole sequences; set cp to 1" in rank["refused"]["rows"]
