"""Expert-parallel ranks over Gloo: layers compute what a whole model computes, and so do training, checkpoints, exports
and what is sent to rollouts. Nightly with four ranks in all layouts, and with all families that have experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_tensor_parallel import AFTER_MORE_STEPS, assert_close, assert_same_numbers, assert_trained_alike, merged

from dovetail.manifest.model_families import MODEL_FAMILIES
from helpers import nightly
from helpers.rank_workers import results_of

WORKER = Path(__file__).with_name("expert_parallel_worker.py")
pytestmark = pytest.mark.slow
# The ranks, and the number of the worker's layout of so many.
USUAL = [(2, 0), (2, 1), (2, 2), (4, 0)]
MORE = [(4, 1), (4, 2), (4, 3), (4, 4), (4, 5), (4, 6)]
LAYOUTS = [*USUAL, *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE)]
KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
EVERY = [kind for kind, family in MODEL_FAMILIES.items() if family.experts or family.matrices]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expert-parallel")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[Any]]:
    asked = nightly.asked(request)
    ran = [("training", 1, 0), *(("training", *each) for each in USUAL + MORE * asked)]
    ran += [("after", 1, 0), ("every_family" if asked else "passes", 4, 0)]
    return results_of(WORKER, folder, ran)


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in EVERY if kind not in KINDS)]
)
def test_passes_equal_the_whole_model_s(results: dict[str, list[Any]], kind: str) -> None:
    """Also with activation checkpointing, and where ranks get no tokens for their experts (`idle`)."""
    for rank in results.get("every_family 4 0") or results["passes 4 0"]:
        found = {name: unlike for name, unlike in rank.items() if name.split()[0] == kind}
        assert {f"{kind} 2", f"{kind} 4"} <= set(found)
        assert (f"{kind} 4 idle" in found) == (MODEL_FAMILIES[kind].softmax_routers and MODEL_FAMILIES[kind].packs)
        for logits, gradients in found.values():
            assert logits < 1e-6
            assert gradients < 1e-5
        assert found[f"{kind} 4 again"] == found[f"{kind} 4"]


@pytest.mark.parametrize(("world", "case"), LAYOUTS)
def test_training_equals_one_rank(results: dict[str, list[Any]], world: int, case: int) -> None:
    ranks = results[f"training {world} {case}"]
    assert_trained_alike(ranks, results["training 1 0"][0])
    for rank in ranks:
        for a, b in zip(rank["read"], results["training 1 0"][0]["read"], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        if "halves" in rank:
            split = {f"{model}/{name}": t for model, named in rank["halves"].items() for name, t in named.items()}
            assert_close(split, {name: merged([rank], "at_two")[name] for name in split})
        assert rank["replay_is_exact"]
        assert rank["recompute_is_exact"]
        assert rank["schedule_is_free"]


def test_each_rank_holds_its_part_of_the_experts_alone(results: dict[str, list[Any]]) -> None:
    whole = merged(results["training 1 0"], "at_two")["actor/model.layers.0.mlp.experts.down_proj"].numel()
    for world, case in USUAL:
        for rank in results[f"training {world} {case}"]:
            held = rank["shards"]["actor.model.layers.0.mlp.experts.down_proj"].numel()
            assert held == whole / world  # as many ranks share all experts


@pytest.mark.parametrize("what", ["zero3", "deepseek_v3", "gpt_oss", "balanced", "adapters"])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_other_models_and_ways_train_as_on_one_rank(results: dict[str, list[Any]], what: str, case: int) -> None:
    reference = results["training 1 0"][0][what]
    assert ("router_aux_loss" in reference["log"][0]["stats"]["actor"]) is (what == "balanced")
    for rank in results[f"training 2 {case}"]:
        assert_close(merged([rank[what]], "at_two"), merged([reference], "at_two"))
        assert_same_numbers(rank[what]["log"], reference["log"])
        assert rank[what]["parts_agree"]


def test_bfloat16_trains_nearly_as_on_one_rank(results: dict[str, list[Any]]) -> None:
    for rank in results["training 2 0"]:
        for low, full in zip(rank["bfloat16"]["log"], results["training 1 0"][0]["bfloat16"]["log"], strict=True):
            assert low["stats"]["actor"]["loss"] == pytest.approx(full["stats"]["actor"]["loss"], rel=0.01)


@pytest.mark.parametrize(("world", "case"), LAYOUTS)
def test_one_rank_goes_on_from_the_checkpoint(results: dict[str, list[Any]], world: int, case: int) -> None:
    one = results["after 1 0"][0][f"{world}-{case}"]
    saved = merged(results[f"training {world} {case}"], "at_two")
    loaded = merged([one], "at_two")
    assert set(loaded) == set(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert_close(merged([one], "end"), merged(results["training 1 0"], "end"), AFTER_MORE_STEPS)


def test_ranks_go_on_from_one_s_checkpoint(results: dict[str, list[Any]]) -> None:
    saved = merged(results["training 1 0"], "at_two")
    for case in range(3):
        for rank in results[f"training 2 {case}"]:
            loaded = merged([rank], "resumed")
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize(("world", "case"), LAYOUTS)
def test_export_is_the_whole_model(results: dict[str, list[Any]], folder: Path, world: int, case: int) -> None:
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / f"actor-{world}-{case}")
    for name, tensor in merged(results[f"training {world} {case}"], "at_two").items():
        if name.startswith("actor/"):
            assert torch.equal(exported.get_parameter(name.removeprefix("actor/")), tensor)


def test_what_cannot_be_divided_is_refused(results: dict[str, list[Any]]) -> None:
    for rank in results["training 2 0"]:
        assert "ep is 2, but layers of llama models have no experts that ranks can divide" in rank["refused"]["dense"]
        assert "ep is 2, which does not divide the 3 experts of a layer; use" in rank["refused"]["experts"]
        assert "models.actor.lora.targetModules: adapters on experts need ep 1" in rank["refused"]["adapters"]
