"""Published models are stored in bfloat16 or float16. They are trained with float32 master weights all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dovetail.manifest.types import Stage
from dovetail.models import HuggingFaceWriter, load_config
from dovetail.models.build import build_stage
from dovetail.protocol.messages import Load, ModelRef, Save
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import TINY, job, sft_batch

Weights = dict[str, torch.Tensor]


def saved(folder: Path, dtype: torch.dtype, stored: torch.dtype) -> Path:
    """A model of random weights, rounded to `dtype`, in files of dtype `stored`."""
    folder.mkdir()
    scratch = ModelRef(head="lm", scratch=TINY, seed=0, path=None, tokenizer=None)
    writer = HuggingFaceWriter(folder)
    tensors = [(name, p.to(dtype)) for name, p in build_stage(scratch).named_parameters()]
    writer.finish([writer.write(tensors, stored)], load_config(scratch), "lm", stored, None)
    return folder


def trained(folder: Path, lora: dict[str, Any] | None) -> Weights:
    """The weights after two steps of SFT."""
    spec = job().model_dump(mode="json", by_alias=True)["spec"]
    actor = {**spec["models"]["actor"], "source": {"path": str(folder)}, "lora": lora}
    sft = {**spec["sft"], "optimizer": {**spec["sft"]["optimizer"], "learningRate": 1e-5}}
    with LocalTrainer(job(models={**spec["models"], "actor": actor}, sft=sft)) as trainer:
        ref = ModelRef(head="lm", path=str(folder), scratch=None, seed=0, tokenizer=None)
        trainer.metrics(Load(id="load", stage=Stage.SFT, models={"actor": ref}, total_steps=8, checkpoint=None))
        held = trainer.runner.engine.models["actor"]
        assert {p.dtype for p in held.module.parameters()} == {torch.float32}
        assert {m.dtype for moments in held.optimizer.moments.values() for m in moments} == {torch.float32}
        for step in (1, 2):
            trainer.metrics(trainer.step(Stage.SFT, step, sft_batch(step), ["actor"], 4))
        return {name: tensor.clone() for name, tensor in trainer.runner.engine.weights("actor")}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_files_dtype_changes_no_bit_of_training(dtype: torch.dtype, lora: Any, tmp_path: Path) -> None:
    """Steps of a usual rate are smaller than the rounding of 16 bits, so such master weights would not learn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        half = trained(saved(tmp_path / "half", dtype, dtype), lora)
        whole = trained(saved(tmp_path / "whole", dtype, torch.float32), lora)
    finally:
        torch.set_num_threads(threads)
    assert half.keys() == whole.keys()
    for name, weight in whole.items():
        assert half[name].dtype == torch.float32
        assert torch.equal(half[name], weight), name
    start = {
        n: p.to(dtype) for n, p in build_stage(ModelRef(head="lm", path=str(tmp_path / "half"))).named_parameters()
    }
    assert any(not torch.equal(start[name].float(), weight) for name, weight in whole.items())


@pytest.mark.slow
def test_a_run_that_began_with_masters_of_16_bits_goes_on_with_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier releases began it, in the dtype of config.json. No bit of its checkpoint is lost."""
    folder, kept = (
        saved(tmp_path / "half", torch.bfloat16, torch.bfloat16),
        str(tmp_path / "checkpoints" / "sft-000001"),
    )
    spec = job().model_dump(mode="json", by_alias=True)["spec"]
    job16 = job(models={**spec["models"], "actor": {**spec["models"]["actor"], "source": {"path": str(folder)}}})
    ref = ModelRef(head="lm", path=str(folder), scratch=None, seed=0, tokenizer=None)
    as_stored = transformers.AutoModelForCausalLM.from_config

    def load(checkpoint: str | None) -> Load:
        return Load(id="load", stage=Stage.SFT, models={"actor": ref}, total_steps=8, checkpoint=checkpoint, run="run")

    def state(trainer: LocalTrainer) -> list[torch.Tensor]:
        held = trainer.runner.engine.models["actor"]
        return [*held.trainable().values(), *(m for pair in held.optimizer.moments.values() for m in pair)]

    with monkeypatch.context() as patch, LocalTrainer(job16) as trainer:
        patch.setattr(
            transformers.AutoModelForCausalLM, "from_config", lambda config, dtype, **more: as_stored(config, **more)
        )
        trainer.metrics(load(None))
        for moments in trainer.runner.engine.models["actor"].optimizer.moments.values():
            for moment in moments:
                moment.uniform_()
        trainer.runner.engine.step = 1
        trainer.metrics(Save(id="save", path=kept, run="run"))
        before = [tensor.detach().clone() for tensor in state(trainer)]
    assert torch.bfloat16 in {tensor.dtype for tensor in before}
    with LocalTrainer(job16) as trainer:
        assert trainer.metrics(load(kept))["step"] == 1.0
        after = state(trainer)
        assert {tensor.dtype for tensor in after} == {torch.float32}
        assert all(torch.equal(a, b.float()) for a, b in zip(after, before, strict=True))
        trainer.metrics(trainer.step(Stage.SFT, 2, sft_batch(2), ["actor"], 4))
