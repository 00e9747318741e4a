"""`dovetail debug replay`: which iterations are run again, and what is said of a difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from dovetail.cli.debug import different
from dovetail.cli.main import cli
from dovetail.coordinator.store.manifest_changes import CHANGES, RANKS
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import Stage
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.errors import UsageError
from dovetail.protocol.messages import Save
from dovetail.tools.replay import Section, choose_section, first_difference
from dovetail.trainer.weights.compare_weights import compare_checkpoints, compare_models, difference
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, sft_batch


@pytest.mark.parametrize(
    ("iteration", "exported", "expected"),
    [
        (3, True, Section(3, 4, "checkpoints/ppo-000004")),
        (4, True, Section(3, 4, "checkpoints/ppo-000004")),
        (5, True, Section(5, 7, "models")),
        (5, False, Section(5, 5, None)),
    ],
)
def test_it_goes_from_the_last_checkpoint_to_the_next_weights(iteration, exported, expected):
    assert choose_section(iteration, 7, [2, 4, 9], range(3, 8), exported) == expected


def test_without_a_checkpoint_it_goes_from_the_beginning():
    assert choose_section(2, 4, [], range(1, 5), True) == Section(1, 4, "models")


@pytest.mark.parametrize(
    ("iteration", "sentence"),
    [
        (8, "iteration 8 cannot be replayed: the run has finished iterations 1 to 7"),
        (1, "the batch of iteration 1 is not kept any more. A run keeps the batches since its oldest checkpoint"),
    ],
)
def test_an_iteration_that_cannot_be_replayed(iteration, sentence):
    with pytest.raises(UsageError, match=sentence):
        choose_section(iteration, 7, [2, 4], range(3, 8), True)


def test_a_folder_that_is_no_run(tmp_path):
    result = CliRunner().invoke(cli, ["debug", "replay", str(tmp_path), "--iteration", "1"])
    assert (result.exit_code, result.output) == (
        2,
        f"Error: {tmp_path} is no run directory: it has no store.sqlite\n",
    )


def test_an_iteration_of_other_trainer_ranks_is_refused(tmp_path: Path):
    """The run went on with one rank after iteration 2, where it had a pipeline of two."""
    spec = job().spec
    (tmp_path / "job.json").write_text(job().model_dump_json(by_alias=True))
    (tmp_path / "plan.json").write_text(make_plan(spec).model_dump_json(by_alias=True))
    (tmp_path / "experience").mkdir()
    for iteration in range(1, 5):
        (tmp_path / "experience" / f"{iteration:06d}.safetensors").touch()
    old = "2 (actor: pp 2, dp 1, tp 1)"
    change = {"field": RANKS, "stage": "ppo", "step": 2, "settled": 2, "old": old, "new": "1 (actor: pp 1, dp 1, tp 1)"}
    store = Store(tmp_path)
    store.put_all({"ppo/progress": {"step": 4}, CHANGES: [change], **{f"ppo/{i}/facts": {} for i in range(1, 5)}})
    store.close()
    result = CliRunner().invoke(cli, ["debug", "replay", str(tmp_path), "--iteration", "2"])
    assert result.exit_code == 2
    assert f"iteration 2 was trained by other trainer ranks, {old}, than the run has since iteration 2" in " ".join(
        result.output.split()
    )


def test_times_are_no_difference():
    stored = {"actor_grad_norm": 1.5, "seconds": 2.0, "activation_peak_bytes": 7.0, "policy_loss": 0.25}
    assert first_difference(stored, {**stored, "seconds": 3.0, "activation_peak_bytes": 8.0}) is None
    # A replay has the whole batch, of which the run had learnt a part before the last sample was there.
    assert first_difference(stored, {**stored, "policy_loss": 0.5}) == "policy_loss: 0.25 in the run, 0.5 now"


# ---------------------------------------------------------------- weights


def test_a_single_bit_is_a_difference():
    weights = torch.tensor([1.0, 0.0, -2.0])
    assert difference("w", weights, weights.clone()) is None
    found = difference("w", weights, torch.tensor([1.0, -0.0, -2.0]))
    assert found is not None
    assert found.sentence() == "w: 1 of 3 elements, by 0 at most"
    assert difference("w", weights, weights.double()).reason == "float32 (3,) in one and float64 (3,) in the other"
    nan = torch.tensor([float("nan")])
    assert difference("w", nan, nan.clone()) is None


def test_exported_models_are_compared_tensor_by_tensor(tmp_path: Path):
    names = ["layers.10.w", "layers.2.w"]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save_file({name: torch.ones(4, dtype=torch.bfloat16) for name in names}, tmp_path / folder / "m.safetensors")
    assert compare_models(tmp_path / "a", tmp_path / "b").differences == []
    changed = {name: torch.full((4,), 1.5, dtype=torch.bfloat16) for name in names}
    save_file({**changed, "head": torch.zeros(1)}, tmp_path / "b" / "m.safetensors")
    found = compare_models(tmp_path / "a", tmp_path / "b")
    assert different(3, "models", found.tensors, found.differences) == (
        "the weights after iteration 3 are not those of models: 3 of 3 tensors differ. "
        "The first is head: only in the second folder"
    )
    assert [each.sentence() for each in found.differences[1:]] == [
        "layers.2.w: 4 of 4 elements, by 0.5 at most",
        "layers.10.w: 4 of 4 elements, by 0.5 at most",
    ]


@pytest.mark.slow
def test_checkpoints_are_compared_with_their_moments(tmp_path: Path):
    with LocalTrainer(job()) as trainer:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            trainer.metrics(load_command(Stage.SFT))
            trainer.metrics(trainer.step(Stage.SFT, 1, sft_batch(seed), ["actor"], 4))
            trainer.metrics(Save(id=name, path=str(tmp_path / name)))
    same = compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert same.tensors > 0
    assert same.differences == []
    other = compare_checkpoints(tmp_path / "a", tmp_path / "c")
    assert other.tensors == same.tensors
    kinds = [each.name.split(".")[1] for each in other.differences]
    assert kinds[0] == "parameters"
    assert set(kinds) >= {"parameters", "first_moments"}
