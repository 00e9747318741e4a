"""`dovetail export`: a model from a checkpoint is the model that the ranks export at that step."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.store.identity import delete_folder, delete_run
from dovetail.manifest.types import Stage
from dovetail.models.model_stage import VALUE_HEAD_FILE
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.messages import Export, Load, Save
from dovetail.tools import checkpoint_export
from dovetail.tools.serving.served_result import model_folder
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import TINY, job, ppo_batch, sft_batch

RUN = "0123456789abcdef"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.train(["hello there, how are you", "two and two are four"], 300)


def invoke(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["export", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_with(run_dir: Path, tokenizer: Any, stage: Stage, exports: dict[str, str], **spec: Any) -> dict[str, Path]:
    """A run that is after step 2 of a stage, with the checkpoints of both steps. Returns what its ranks export, by the
    names of `exports` (folder: model in the trainer)."""
    config = {**TINY.config, "vocab_size": 300}
    actor = {"source": {"scratch": {"architecture": "llama", "config": config}}, **spec.pop("actor", {})}
    described = job(stages=[stage.value], models={"actor": actor, **spec.pop("models", {})}, **spec)
    run_dir.mkdir()
    (run_dir / "job.json").write_text(described.model_dump_json(by_alias=True))
    tokenizer.save_pretrained(run_dir / "tokenizer")
    (run_dir / "models" / "actor-config").mkdir(parents=True)
    refs = checkpoint_export.stage_sources(run_dir, described, stage)
    with LocalTrainer(described) as trainer:
        trainer.metrics(Load(id="load", stage=stage, models=refs, total_steps=8, run=RUN))
        for step in (1, 2):
            batch = ppo_batch(step) if stage is Stage.PPO else sft_batch(step)
            trainer.metrics(trainer.step(stage, step, batch, list(refs), 4))
            path = run_dir / "checkpoints" / f"{stage.value}-{step:06d}"
            trainer.metrics(Save(id=f"save-{step}", path=str(path), run=RUN))
        for folder, model in exports.items():
            path = run_dir.with_name("ranks") / folder
            trainer.metrics(Export.model_validate({"id": f"e-{folder}", "model": model, "path": str(path), "run": RUN}))
    return {folder: run_dir.with_name("ranks") / folder for folder in exports}


def same_files(one: Path, other: Path) -> None:
    """Every file that the ranks wrote is in the other folder, byte for byte."""
    for path in (path for path in one.rglob("*") if path.is_file()):
        assert (other / path.relative_to(one)).read_bytes() == path.read_bytes(), path.name


def test_a_step_of_sft(tmp_path: Path, tokenizer: Any) -> None:
    made = run_with(tmp_path / "run", tokenizer, Stage.SFT, {"sft": "actor"})
    assert invoke(tmp_path / "run", "-o", tmp_path / "new") == (0, f"Wrote sft after step 2 of sft to {tmp_path}/new\n")
    same_files(made["sft"], tmp_path / "new")
    assert json.loads((tmp_path / "new" / "dovetail.json").read_text()) == {"run": RUN, "stage": "sft", "step": 2}
    assert "after step 2 of its stage" in (tmp_path / "new" / "README.md").read_text()
    assert (tmp_path / "new" / "chat_template.jinja").is_file()
    # What a step before wrote is another model.
    assert invoke(tmp_path / "run", "--iteration", "1", "-o", tmp_path / "first")[0] == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("new", "first")]
    assert weights[0] != weights[1]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["sft-000001", "sft-000002"]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_the_models_of_ppo(shared: bool, tmp_path: Path, tokenizer: Any) -> None:
    names = {"actor": "actor", "actor-ema": "ema"} | ({} if shared else {"critic": "critic"})
    more = {"models": {"critic": {"shareActorBody": True}}} if shared else {}
    made = run_with(tmp_path / "run", tokenizer, Stage.PPO, names, ppo={"ema": 0.5}, **more)
    for name in names:
        code, said = invoke(tmp_path / "run", "--model", name, "--iteration", "2", "-o", tmp_path / name)
        assert (code, said) == (0, f"Wrote {name} after iteration 2 to {tmp_path / name}\n")
        same_files(made[name], tmp_path / name)
    assert (tmp_path / "actor" / VALUE_HEAD_FILE).is_file() is shared


@pytest.mark.slow
def test_adapters_merged_and_alone(tmp_path: Path, tokenizer: Any) -> None:
    from peft import PeftModel

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**TINY.config, "vocab_size": 300, "eos_token_id": tokenizer.eos_token_id})
    base = tmp_path / "base"
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    actor = {"source": {"path": str(base)}, "lora": {"rank": 4, "alpha": 12.0}}
    made = run_with(tmp_path / "run", tokenizer, Stage.SFT, {"sft": "actor"}, actor=actor)
    assert invoke(tmp_path / "run", "-o", tmp_path / "whole")[0] == 0
    same_files(made["sft"], tmp_path / "whole")
    code, said = invoke(tmp_path / "run", "--adapter", "-o", tmp_path / "adapter")
    assert (code, said) == (0, f"Wrote the adapters of sft after step 2 of sft to {tmp_path / 'adapter'}\n")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["task_type"], told["r"]) == (str(base), "CAUSAL_LM", 4)
    tokens = torch.arange(2, 40)[None]
    adapted = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(adapted(tokens).logits, whole(tokens).logits, atol=1e-5, rtol=1e-5)
    start = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert (whole(tokens).logits - start(tokens).logits).abs().max() > 1e-3


@pytest.fixture
def stopped(tmp_path: Path, tokenizer: Any) -> Path:
    run_with(tmp_path / "run", tokenizer, Stage.SFT, {})
    return tmp_path / "run"


def test_a_run_that_goes_on_may_delete_the_checkpoint_meanwhile(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.trainer.weights import saved_model

    read = saved_model.checked_state

    def deleting(path: Path) -> dict[str, Any]:
        state = read(path)
        delete_folder(stopped / "checkpoints" / "sft-000002", stopped, RUN)
        return state

    assert invoke(stopped, "-o", tmp_path / "before")[0] == 0
    monkeypatch.setattr(saved_model, "checked_state", deleting)
    assert invoke(stopped, "-o", tmp_path / "during")[0] == 0
    same_files(tmp_path / "before", tmp_path / "during")
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["sft-000001"]


def test_a_run_that_may_only_be_read(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(stopped, "-o", tmp_path / "linked")[0] == 0
    made = tempfile.TemporaryDirectory

    def refusing(**options: Any) -> Any:
        if stopped in Path(options.get("dir") or "/").parents:
            raise PermissionError(errno.EROFS, "Read-only file system")
        return made(**options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refusing)
    assert invoke(stopped, "-o", tmp_path / "read")[0] == 0
    same_files(tmp_path / "linked", tmp_path / "read")


def test_the_best_weights_are_in_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/ppo-000001").mkdir(parents=True)
    (tmp_path / "job.json").write_text(job(stages=["ppo"]).model_dump_json(by_alias=True))
    with pytest.raises(UsageError, match=r"no checkpoint has the model actor-best.*leave out --iteration"):
        model_folder(tmp_path, "actor-best", 1)


def test_what_cannot_be_exported_is_one_sentence(stopped: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.mkdir()
    new = tmp_path / "new"
    assert invoke(stopped, "-o", own)[0] == 0, "an empty folder is taken"
    (tmp_path / "file").write_text("x")
    cases: list[tuple[list[str | Path], str]] = [
        ([stopped, "--iteration", "7", "-o", new], "keeps no model sft after step 7 of sft, only after 1, 2 (spec"),
        ([stopped, "--model", "actor", "-o", new], "trains no model actor; it trains sft"),
        ([stopped, "--model", "critic", "-o", new], "trains no model critic; it trains sft"),
        ([stopped, "--adapter", "-o", new], "without spec.models.actor.lora; leave out --adapter"),
        ([stopped, "-o", own], "mine is there already; name a new folder"),
        ([stopped, "-o", tmp_path / "file"], "file is there already; name a new folder"),
        ([tmp_path, "-o", new], "is no run directory: it has no job.json"),
    ]
    for words, sentence in cases:
        code, said = invoke(*words)
        assert code == 2
        assert sentence in said
        assert said.count("\n") == 1
    part = next((stopped / "checkpoints" / "sft-000002").glob("__0_*"))
    part.write_bytes(part.read_bytes()[:-8] + b"damaged!")
    code, said = invoke(stopped, "-o", new)
    assert code == 1
    assert "is damaged: its content is not what was saved" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "run"], "nothing is left behind"


def test_a_finished_model_is_copied_and_has_no_adapters(tmp_path: Path, tokenizer: Any) -> None:
    made = run_with(tmp_path / "run", tokenizer, Stage.SFT, {"sft": "actor"}, actor={"lora": {"rank": 2}})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(made["sft"], tmp_path / "run" / "models" / "sft")
    assert invoke(tmp_path / "run", "-o", tmp_path / "new") == (0, f"Wrote sft after step 2 of sft to {tmp_path}/new\n")
    same_files(made["sft"], tmp_path / "new")
    code, said = invoke(tmp_path / "run", "--adapter", "-o", tmp_path / "adapter")
    assert code == 2
    assert "keeps no checkpoint with the model sft" in said


def test_chat_serve_and_push_take_a_checkpoint(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="dovetail export, or --iteration here, takes one from a checkpoint"):
        model_folder(stopped, "sft")
    folder = model_folder(stopped, "sft", 1)
    assert invoke(stopped, "--iteration", "1", "-o", tmp_path / "same")[0] == 0
    same_files(tmp_path / "same", folder)
    shutil.rmtree(stopped / "checkpoints")
    assert model_folder(stopped, "sft", 1) == folder, "made once"
    with pytest.raises(UsageError, match="keeps no checkpoint with the model sft"):
        model_folder(stopped, "sft", 2)
    for words in (["serve"], ["chat"], ["push", "me/mine"]):
        result = CliRunner().invoke(cli, [words[0], str(stopped), *words[1:], "--model", "sft", "--iteration", "2"])
        assert result.exit_code == 2
        assert "keeps no checkpoint with the model sft" in result.output
    delete_run(stopped, RUN)
    assert not list(stopped.iterdir()), "--overwrite deletes it"
