"""The engine on 1 and 2 real ranks over Gloo, nightly also on 4: equal results, exact replays, resharding, faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers import nightly

WORKER = Path(__file__).with_name("engine_worker.py")
pytestmark = pytest.mark.slow

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return (1, 2, 4) if nightly.asked(request) else (1, 2)


@pytest.fixture(scope="module")
def folder(worlds: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all ranks of all phases have run: training in worlds of 1 and 2, the faults, two ranks that meet late, and
    training in a world of 4."""
    folder = tmp_path_factory.mktemp("engine")
    training = [[{"scenario": "training", "world": w, "rank": r} for r in range(w)] for w in worlds]
    victims = [{"scenario": "victim", "world": 2, "rank": 1, "case": case} for case in range(4)]
    faults = [{"scenario": "survivor", "world": 2, "rank": 0}, *victims]
    phases = [*training[:2], faults, [{"scenario": "lazy", "world": 2, "rank": r} for r in range(2)], *training[2:]]
    command = [sys.executable, str(WORKER), str(folder), json.dumps(phases)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=3500)
    return folder


@pytest.fixture(scope="module")
def statuses(folder: Path) -> list[list[int]]:
    """Exit statuses by phase and job. Fails, with the logs, unless all ranks but the victims succeeded."""
    found: list[list[int]] = json.loads((folder / "statuses.json").read_text())
    others = [*found[:2], *found[4:]]
    if len(found) < 4 or any(s for phase in others for s in phase) or found[2][0]:
        logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in folder.glob("*.log"))
        raise AssertionError(f"ranks ended with {found}:\n{logs}")
    return found


@pytest.fixture(scope="module")
def results(folder: Path, worlds: tuple[int, ...], statuses: list[list[int]]) -> Results:
    return {w: [torch.load(folder / f"training-{w}-{r}.pt") for r in range(w)] for w in worlds}


def merged(results: Results, world: int, layout: str, which: str, *path: str) -> dict[str, torch.Tensor]:
    """All stages' tensors of all models."""
    tensors: dict[str, torch.Tensor] = {}
    for rank in results[world]:
        part = rank[layout]
        for key in path:
            part = part[key]
        for model, named in part[which].items():
            tensors |= {f"{model}/{name}": tensor for name, tensor in named.items()}
    return tensors


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


# "whole": every data-parallel rank holds the whole stage. "zero3": each pass gathers the weights layer by layer.
SPLIT = [
    (2, "2x1"),
    (2, "1x2"),
    (2, "1x2 whole"),
    (2, "1x2 zero3"),
    *(pytest.param(4, layout, marks=pytest.mark.nightly) for layout in ("2x2", "2x2 whole", "2x2 zero3")),
]
ALL = [(1, "1x1"), *SPLIT]


@pytest.mark.parametrize(("world", "layout"), SPLIT)
def test_training_equals_one_process(results: Results, world: int, layout: str) -> None:
    for which in ("at_two", "end"):
        assert_close(merged(results, world, layout, which), merged(results, 1, "1x1", which))
    reference = results[1][0]["1x1"]
    for rank in results[world]:
        assert rank[layout]["log"] == results[world][0][layout]["log"], "ranks see different numbers"
        for mine, theirs in zip(rank[layout]["log"], reference["log"], strict=True):
            for model in ("actor", "critic"):
                assert mine["stats"][model] == pytest.approx(theirs["stats"][model], rel=1e-5)
                assert mine["norms"][model] == pytest.approx(theirs["norms"][model], rel=1e-4)
        for a, b in zip(rank[layout]["read"], reference["read"], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_training_learns_and_clips(results: Results) -> None:
    log = results[1][0]["1x1"]["log"]
    assert log[0]["stats"]["actor"]["count"] == 8
    assert log[0]["norms"]["actor"]["grad_norm"] > 0.5
    assert log[-1]["stats"]["critic"]["loss"] < log[0]["stats"]["critic"]["loss"]


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_same_bits_after_restart_and_under_any_schedule(results: Results, world: int, layout: str) -> None:
    for rank in results[world]:
        assert rank[layout]["replay_is_exact"]
        assert rank[layout]["recompute_is_exact"]
        assert rank[layout]["schedule_is_free"]


@pytest.mark.parametrize(
    ("world", "layout"), [(2, "1x2 zero3"), pytest.param(4, "2x2 zero3", marks=pytest.mark.nightly)]
)
def test_gathering_weights_by_layer_changes_no_bit(results: Results, world: int, layout: str) -> None:
    """In float32, in bfloat16 and with adapters that drop out, where each rank has one micro-batch a step."""
    for rank in results[world]:
        assert rank[layout]["unlike"] == []


@pytest.mark.nightly
def test_messages_of_ranks_that_share_a_gpu_change_no_bit(results: Results) -> None:
    """They go through host memory, and threads of their own add up gradients. Here all memory is the host's."""
    for rank in results[4]:
        assert rank["2x2"]["unlike_if_staged"] == []


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_what_a_rank_sends_is_its_part_of_what_it_gathers(results: Results, world: int, layout: str) -> None:
    for rank in results[world]:
        assert rank[layout]["parts_agree"]
        if "lora" in rank[layout]:
            assert rank[layout]["lora"]["parts_agree"]


@pytest.mark.parametrize("layout", ["1x2 in 2x1", "2x1 in 1x2", "1x2 whole in 1x2", "1x2 zero3 in 2x1"])
def test_checkpoint_loads_into_another_layout(results: Results, layout: str) -> None:
    source = layout.split(" in ")[0]
    loaded, saved = merged(results, 2, layout, "at_two"), merged(results, 2, source, "at_two")
    assert set(loaded) == set(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert results[2][0][layout]["step"] == 2
    assert_close(merged(results, 2, layout, "end"), merged(results, 1, "1x1", "end"))


def hugging_face_logits(model: Any, batch: Any) -> torch.Tensor:
    """Of each of the micro-batch's sequences by itself, at the wanted positions."""
    sequences = batch.packed.tokens[0].split(batch.packed.lengths)
    return torch.cat([model(tokens[None]).logits[0] for tokens in sequences])[batch.packed.wanted]


@pytest.mark.parametrize(("world", "layout"), ALL)
@pytest.mark.parametrize("model", ["actor", "ema"])
def test_export_loads_in_transformers(results: Results, folder: Path, world: int, layout: str, model: str) -> None:
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder / f"{model}-{layout}", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in merged(results, world, layout, "at_two").items():
        if name.startswith(f"{model}/"):
            assert torch.equal(exported.get_parameter(name.removeprefix(f"{model}/")), tensor)
    if model == "actor":
        sys.path.insert(0, str(WORKER.parent))
        from engine_worker import micro_batches

        for batch, expected in zip(micro_batches("lm", 9, 0, 1), results[world][0][layout]["read"], strict=True):
            logits = hugging_face_logits(exported, batch)
            torch.testing.assert_close(logits.logsumexp(-1), expected, atol=1e-5, rtol=0)
        critic = transformers.AutoModelForSequenceClassification.from_pretrained(folder / f"critic-{layout}")
        assert critic.config.num_labels == 1


@pytest.mark.parametrize(("world", "layout"), [(1, "1x1"), (2, "2x1"), (2, "1x2")])
def test_adapters_train_alone_and_export_merged(results: Results, folder: Path, world: int, layout: str) -> None:
    for rank in results[world]:
        lora = rank[layout]["lora"]
        assert lora["base_is_frozen"]
        assert lora["replay_is_exact_0.0"]
        assert lora["replay_is_exact_0.3"]
    end = merged(results, world, layout, "end", "lora")
    assert_close(end, merged(results, 1, "1x1", "end", "lora"))
    start = merged(results, world, layout, "start", "lora")
    changed = {name for name in start if name.startswith("actor/") and not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if name.startswith("actor/") and "_proj." in name}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"lora-{layout}")
    sys.path.insert(0, str(WORKER.parent))
    from engine_worker import micro_batches

    for batch, logits in zip(micro_batches("lm", 9, 0, 1), results[world][0][layout]["lora"]["read"], strict=True):
        torch.testing.assert_close(hugging_face_logits(model, batch), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("world", "layout"), [(1, "1x1"), (2, "2x1"), (2, "1x2")])
def test_bfloat16_keeps_float32_masters(results: Results, folder: Path, world: int, layout: str) -> None:
    mixed = results[world][0][layout]["bfloat16"]
    assert mixed["dtypes"] == {"torch.float32"}
    for low, full in zip(mixed["log"], results[1][0]["1x1"]["log"], strict=False):
        for model in ("actor", "critic"):
            assert low["stats"][model]["loss"] == pytest.approx(full["stats"][model]["loss"], rel=0.03)
    config = json.loads((folder / f"bfloat16-{layout}" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(("world", "layout"), [(1, "1x1"), (2, "2x1"), (2, "1x2")])
def test_failed_writes_leave_nothing(results: Results, world: int, layout: str) -> None:
    for rank in results[world]:
        disk = rank[layout]["disk"]
        assert "could not be written" in disk["save"]
        assert disk["save_left"] == []
        if layout != "1x2":  # there the last rank writes no part of an export
            assert "could not be written" in disk["export"]
            assert disk["export_left"] == []


def test_lost_peers_surface_and_groups_form_again(results: Results, folder: Path, statuses: list[list[int]]) -> None:
    assert statuses[2][1:3] == [-signal.SIGKILL, -signal.SIGKILL]
    out = torch.load(folder / "survivor-2-0.pt")
    for case in ("pp-kill", "dp-kill", "pp-stop"):
        message, waited = out[case]
        assert waited < 600, "a lost connection is noticed at once, a stopped peer after ten seconds"
        assert "trainer rank 1" in message or case == "dp-kill", message
    assert all(torch.equal(out["pp-none"][name], tensor) for name, tensor in results[2][0]["2x1"]["shards"].items())


def test_a_pipeline_starts_where_communicators_are_made_by_the_first_message(
    results: Results, folder: Path, statuses: list[list[int]]
) -> None:
    """As NCCL's are: a rank that waits for its first gradient before it has sent its first activation hangs."""
    assert statuses[3] == [0, 0], [log.read_text()[-2000:] for log in folder.glob("lazy-*.log")]
    for rank in range(2):
        log = torch.load(folder / f"lazy-2-{rank}.pt")["log"]
        assert log == results[2][rank]["2x1"]["log"][:2]
