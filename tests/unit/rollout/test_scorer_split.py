"""Models that a scorer splits by layers over several devices, with the CPU playing all of them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.manifest.types import ScratchModel
from dovetail.models import PipelineStage, build_stage
from dovetail.protocol.messages import ModelRef
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring import scorer
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from dovetail.rollout.scoring.split import SplitModel, StagePass, build_split
from helpers.patience import PATIENCE
from helpers.scorers import CONFIG, VOCABULARY, FakeCopies, samples

OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "word_embed_proj_dim": 16,
    "ffn_dim": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "do_layer_norm_before": False,
}
LLAMA = CONFIG | {"num_hidden_layers": 5}


def refs(architecture: str, **more: object) -> dict[str, ModelRef]:
    config = (OPT if architecture == "opt" else LLAMA) | more
    scratch = ScratchModel(architecture=architecture, config=config)  # type: ignore[arg-type]
    return {name: ModelRef(head=head, scratch=scratch, seed=7) for name, head in scoring.HEADS.items()}


def loaded(models: dict[str, ModelRef], **how: Any) -> scoring.ModelScorer:
    """With value heads that are not zero."""
    made = scoring.ModelScorer(max_tokens=48, **how)
    made.load(models)
    for name in ("reward", "critic"):
        parameters = dict(made.require(name).named_parameters())
        parameters["score.weight"].data.normal_(generator=torch.Generator().manual_seed(len(name)))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("opt", True)])
def test_scores_are_the_same_bits_whole_and_split(
    architecture: str, tied: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SCORER_CPU_TOKENS", 48)
    models, arrays = refs(architecture, tie_word_embeddings=tied), SamplesToScore.read(samples(n=12))
    whole, split = loaded(models), loaded(models, devices=["cpu"] * stages)
    # No more stages than layers.
    assert [len(part.layer_ids) for part in split.require("reference").stages] == {
        2: [3, 2],
        3: [2, 2, 1],
        8: [1] * 5,
    }[stages]
    expected, got = whole.score(scoring.MODELS, arrays, 0.7), split.score(scoring.MODELS, arrays, 0.7)
    assert set(got) == {"ref_logprobs", "scores", "values"}
    for name in expected:
        assert np.abs(expected[name]).max() > 0
        np.testing.assert_array_equal(got[name], expected[name])


def test_only_the_models_that_the_plan_names_are_split() -> None:
    made = loaded(refs("llama"), devices=["cpu"] * 3, split={"reference": 3, "critic": 2})
    assert {name: len(made.require(name).stages) for name in scoring.MODELS} == {
        "reference": 3,
        "reward": 1,
        "critic": 2,
    }


@pytest.mark.parametrize("on_host", [False, True])
def test_new_weights_go_to_the_stages_that_hold_them(on_host: bool) -> None:
    models, arrays = refs("llama"), SamplesToScore.read(samples())
    more: dict[str, Any] = {"copies": [FakeCopies(), FakeCopies()]} if on_host else {}
    made = loaded(models, devices=["cpu", "cpu"], **more)
    old = made.score(["critic"], arrays)["values"]
    new = build_stage(models["critic"].model_copy(update={"seed": 8}))
    new.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    tensors = dict(new.named_parameters())
    made.apply_weights(made.stage_weights(tensors.items()), 4)
    first, second = made.require("critic").stages
    assert "model.layers.2.mlp.up_proj.weight" in dict(first.named_parameters())
    assert "model.layers.3.mlp.up_proj.weight" in dict(second.named_parameters())
    for stage in (first, second):
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, tensors[name])
    expected = scoring.ModelScorer()
    expected.load({"critic": models["critic"]})
    expected.apply_weights(expected.stage_weights(tensors.items()), 4)
    values = expected.score(["critic"], arrays)["values"]
    assert np.abs(values - old).max() > 1e-3
    for _ in range(2):
        np.testing.assert_array_equal(made.score(["critic"], arrays)["values"], values)
        made.leave()
    with pytest.raises(ValueError, match=r"did not come, first model\.layers\.4"):
        made.stage_weights((n, t) for n, t in tensors.items() if "layers.4" not in n)


def test_weights_in_host_memory_go_to_each_stages_own_device() -> None:
    models, arrays = refs("llama"), SamplesToScore.read(samples())
    expected = loaded(models).score(scoring.MODELS, arrays)
    devices = [FakeCopies(), FakeCopies()]
    made = loaded(models, devices=["cpu", "cpu"], copies=devices)
    made.leave()
    assert sorted(made.bring()) == sorted(models)
    got = made.score(scoring.MODELS, arrays)
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name])
    held = [sum(t.nbytes for t in device.there) for device in devices]
    assert min(held) > 0.3 * sum(held), "each has its layers only"
    made.leave()
    assert not any(device.there for device in devices)
    # One device has no room: nothing of it counts as there.
    devices[1].room = 0
    assert made.bring() == []


class Meeting:
    """Stands in for a stage: a pass may leave it once another pass has come to the other stage."""

    def __init__(self, both: threading.Barrier, is_last: bool) -> None:
        self.both, self.is_last = both, is_last
        self.seen = 0

    def __call__(self, inputs: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.seen += 1
        # The first stage's first pass and the last one's last pass have nobody to meet.
        if self.seen < PASSES if self.is_last else self.seen > 1:
            self.both.wait(timeout=PATIENCE)
        return inputs + 1


PASSES = 4


def one(number: int) -> StagePass[int]:
    tokens = np.array([number])
    return StagePass(tokens, (1,), (None,), tokens, lambda found: int(found.item()))


def test_stages_work_on_passes_one_after_the_other_at_the_same_time() -> None:
    both = threading.Barrier(2)
    stages: list[Any] = [Meeting(both, is_last=False), Meeting(both, is_last=True)]
    split = SplitModel(stages, [torch.device("cpu")] * 2)
    assert list(split.run(map(one, range(PASSES)))) == [2, 3, 4, 5]


def test_a_pass_that_fails_ends_the_run_and_the_next_one_works() -> None:
    built = build_split(refs("llama")["reward"], 2, [torch.device("cpu")] * 2, torch.float32)
    assert all(isinstance(stage, PipelineStage) for stage in built.stages)
    with pytest.raises(IndexError):
        list(built.run(map(one, [0, VOCABULARY + 1, 0, 0, 0])))
    assert list(built.run(map(one, [0]))) == [0]


def test_devices_are_those_that_the_plan_says_as_far_as_they_are_there() -> None:
    split = scorer.Settings(split={"reference": 4, "reward": 2})
    assert scorer.devices_for(split, None, 8) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert scorer.devices_for(split, None, 2) == ["cuda:0", "cuda:1"]
    assert scorer.devices_for(split, None, 0) == ["cpu"]
    assert scorer.devices_for(scorer.Settings(), None, 8) == ["cuda:0"]
    assert scorer.devices_for(scorer.Settings(on_gpu=False, split={"reference": 4}), None, 8) == ["cpu"]
    assert scorer.devices_for(split, "cpu,cpu", 8) == ["cpu", "cpu"]
