"""Tensor parallel training on 2 real ranks over Gloo, nightly also on 4, equals one rank's; checkpoints go from one to
the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers import nightly

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
pytestmark = pytest.mark.slow
FAMILIES = ("llama", "qwen2", "qwen3", "opt", "gemma2", "gemma3_text")
SPLIT = [
    (2, "1x1x2"),
    *(pytest.param(4, layout, marks=pytest.mark.nightly) for layout in ("2x1x2", "1x2x2", "1x2x2 whole")),
]

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return (1, 2, 4) if nightly.asked(request) else (1, 2)


@pytest.fixture(scope="module")
def folder(worlds: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    phases = [[{"scenario": "training", "world": w, "rank": r} for r in range(w)] for w in worlds]
    phases.append([{"scenario": "after", "world": 1, "rank": 0}])
    command = [sys.executable, str(WORKER), str(folder), json.dumps(phases)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=3500)
    found = json.loads((folder / "statuses.json").read_text())
    if len(found) < len(phases) or any(s for phase in found for s in phase):
        logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in folder.glob("*.log"))
        raise AssertionError(f"ranks ended with {found}:\n{logs}")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path, worlds: tuple[int, ...]) -> Results:
    return {w: [torch.load(folder / f"training-{w}-{r}.pt") for r in range(w)] for w in worlds}


def merged(ranks: list[dict[str, Any]], which: str) -> dict[str, torch.Tensor]:
    """All stages' tensors of all models."""
    return {
        f"{model}/{name}": tensor
        for rank in ranks
        for model, named in rank[which].items()
        for name, tensor in named.items()
    }


# Adam makes steps of the learning rate, 1e-2, of gradients that are nothing but rounding (of keys' biases).
AFTER_MORE_STEPS = 1e-4


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], within: float = 1e-5) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=within, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_numbers(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        for model in ("actor", "critic"):
            assert a["stats"][model] == pytest.approx(b["stats"][model], rel=1e-5)
            assert a["norms"][model] == pytest.approx(b["norms"][model], rel=1e-4)


def assert_trained_alike(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert_close(merged(ranks, "at_two"), merged([reference], "at_two"))
    if "end" in ranks[0]:
        assert_close(merged(ranks, "end"), merged([reference], "end"), AFTER_MORE_STEPS)
    for rank in ranks:
        assert rank["log"] == ranks[0]["log"], "ranks see different numbers"
        assert_same_numbers(rank["log"], reference["log"][: len(rank["log"])])
        assert rank["parts_agree"]


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_equal_the_whole_model_s(results: Results, family: str) -> None:
    for rank in results[2]:
        logits, gradients = rank["passes"][family]
        assert logits < 1e-5
        assert gradients < 1e-5


@pytest.mark.parametrize(("world", "layout"), SPLIT)
def test_training_equals_one_rank(results: Results, world: int, layout: str) -> None:
    reference = results[1][0]["1x1x1"]
    ranks = [rank[layout] for rank in results[world]]
    assert_trained_alike(ranks, reference)
    for rank in ranks:
        assert rank.get("uneven", (True, True)) == (True, True)
        assert rank["peak_bytes"] < reference["peak_bytes"]


@pytest.mark.nightly
def test_backwards_in_two_halves_are_as_whole_ones(results: Results) -> None:
    ranks = [rank["2x1x2"] for rank in results[4]]
    assert_close(
        merged([{"end": {m: t for m, t in rank["halves"].items() if m != "ema"}} for rank in ranks], "end"),
        {name: t for name, t in merged(ranks, "at_two").items() if not name.startswith("ema/")},
    )


def test_forward_passes_and_replays_are_as_on_one_rank(results: Results) -> None:
    for rank in results[2]:
        mine = rank["1x1x2"]
        for a, b in zip(mine["read"], results[1][0]["1x1x1"]["read"], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert mine["replay_is_exact"]
        assert mine["recompute_is_exact"]
        assert mine["schedule_is_free"]


def test_bfloat16_keeps_float32_masters(results: Results) -> None:
    for rank in results[2]:
        mixed = rank["bfloat16"]
        assert mixed["dtypes"] == {"torch.float32"}
        for low, full in zip(mixed["log"], results[1][0]["1x1x1"]["log"], strict=False):
            for model in ("actor", "critic"):
                assert low["stats"][model]["loss"] == pytest.approx(full["stats"][model]["loss"], rel=0.03)


@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_families_train_as_on_one_rank(results: Results, family: str) -> None:
    reference = results[1][0][family]
    for rank in results[2]:
        assert_close(merged([rank[family]], "end"), merged([reference], "end"), AFTER_MORE_STEPS)
        assert_same_numbers(rank[family]["log"], reference["log"])
        assert rank[family]["parts_agree"]


@pytest.mark.parametrize(("world", "layout"), SPLIT[:3])
def test_one_rank_goes_on_from_the_checkpoint(results: Results, folder: Path, world: int, layout: str) -> None:
    one = torch.load(folder / "after-1-0.pt")[layout]
    saved = merged([rank[layout] for rank in results[world]], "at_two")
    loaded = merged([one], "at_two")
    assert set(loaded) == set(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert_close(merged([one], "end"), merged([results[1][0]["1x1x1"]], "end"), AFTER_MORE_STEPS)


def test_two_ranks_go_on_from_one_s_checkpoint(results: Results) -> None:
    saved = merged([results[1][0]["1x1x1"]], "at_two")
    for rank in results[2]:
        loaded = merged([rank["resumed"]], "at_two")
        assert set(loaded) == set(saved)
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert_close(merged([rank["resumed"]], "end"), merged([results[1][0]["1x1x1"]], "end"), AFTER_MORE_STEPS)


@pytest.mark.parametrize(("world", "layout"), SPLIT)
def test_export_is_the_whole_model(results: Results, folder: Path, world: int, layout: str) -> None:
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / f"actor-{layout}")
    for name, tensor in merged([rank[layout] for rank in results[world]], "at_two").items():
        if name.startswith("actor/"):
            assert torch.equal(exported.get_parameter(name.removeprefix("actor/")), tensor)


@pytest.mark.parametrize(
    ("world", "layout", "family"),
    [
        (2, "1x1x2", "llama"),
        (2, "1x1x2", "opt"),
        *(pytest.param(4, layout, "llama", marks=pytest.mark.nightly) for layout in ("2x1x2", "1x2x2")),
    ],
)
def test_adapters_train_as_on_one_rank(results: Results, folder: Path, world: int, layout: str, family: str) -> None:
    reference = results[1][0][f"1x1x1 {family} lora"]
    ranks = [rank[f"{layout} {family} lora"] for rank in results[world]]
    end, start = (merged([reference], which) for which in ("end", "start"))
    assert_close(merged(ranks, "start"), start, 0.0)
    assert_close(merged(ranks, "end"), end, AFTER_MORE_STEPS)
    assert any((end[name] - start[name]).abs().max() > 1e-3 for name in end if "_proj" in name), "the adapters learn"
    for rank in ranks:
        assert rank["log"] == ranks[0]["log"], "ranks see different numbers"
        assert_same_numbers(rank["log"], reference["log"])
        assert rank["base_is_frozen"]
        assert rank["parts_agree"]
        assert rank["replay_is_exact_0.0"]
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / f"lora-{layout}-{family}")
    for name, tensor in merged(ranks, "end").items():
        if name.startswith("actor/"):
            assert torch.equal(exported.get_parameter(name.removeprefix("actor/")), tensor)


def test_what_cannot_be_split_is_refused(results: Results) -> None:
    for rank in results[2]:
        assert (
            "tp is 2, which does not divide its num_key_value_heads, 1 of the model"
            in rank["refused"]["num_key_value_heads"]
        )
        assert (
            "tp is 2, which does not divide its intermediate_size, 47 of the model"
            in rank["refused"]["intermediate_size"]
        )
        assert "models.actor.lora.dropout" in rank["refused"]["lora"]


def test_a_lost_rank_is_told(results: Results) -> None:
    assert "of critic" in results[2][0]["lost"]
