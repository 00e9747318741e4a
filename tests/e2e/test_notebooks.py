"""The programs of examples/notebooks, as they are: each begins with what the ones before it left in the folder."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.local.llm import LLM, SamplingParams
from dovetail.local.sample_texts import read
from dovetail.local.serving import served_result
from helpers import vllm_cli
from helpers.jobs import history, summary
from helpers.nursery import forked_jobs

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


BEFORE = dict.fromkeys(["preferences", "ppo", "grpo", "own_reward"], "sft") | dict.fromkeys(
    ["distillation", "generate"], "grpo"
)


class Folder:
    """Where the notebooks run. A notebook runs once, after the one whose model it needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = {p.pid for p in psutil.Process().children(recursive=True)}
        self._found: dict[str, dict[str, Any]] = {}

    def left(self) -> list[psutil.Process]:
        """The processes of servers and trainers that still run."""
        found = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        return [p for p in found if p.pid not in self._before]

    def run(self, name: str, ends: bool = True) -> dict[str, Any]:
        """The names that the notebook defined. `ends`: it has ended all that it started."""
        if name in BEFORE:
            self.run(BEFORE[name])
        if name not in self._found:
            self._found[name] = runpy.run_path(str(NOTEBOOKS / f"{name}.py"))
            assert not ends or self.left() == []
        return self._found[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("notebooks")
    with pytest.MonkeyPatch.context() as patch, forked_jobs():
        patch.chdir(path)
        patch.setattr(served_result, "_started", vllm_cli.started)
        yield Folder(path)


def test_every_notebook_is_run_here_and_is_short() -> None:
    names = {path.stem for path in NOTEBOOKS.glob("*.py")}
    assert names == {"sft", *BEFORE}
    for path in NOTEBOOKS.glob("*.py"):
        text = path.read_text()
        assert text.startswith("# %% [markdown]\n# # ")
        assert len(text.splitlines()) <= 42, path.name


def test_sft(folder: Folder) -> None:
    found = folder.run("sft")["summary"]["sft"]
    assert found["loss_after"] < found["loss_before"] - 1
    assert (folder.path / "runs/sft/models/sft/model.safetensors").is_file()


def test_preferences(folder: Folder) -> None:
    found = folder.run("preferences")["dpo"]
    assert found["loss_after"] < found["loss_before"]
    assert found == summary(folder.path / "runs/dpo")["dpo"]


def test_ppo(folder: Folder) -> None:
    folder.run("ppo")
    rows = history(folder.path / "runs/ppo", "ppo")
    assert sorted(rows) == [1, 2]
    assert all(math.isfinite(row["reward"]) and row["value_loss"] > 0 for row in rows.values())


def test_grpo(folder: Folder) -> None:
    assert folder.run("grpo")["summary"]["evaluation"]["reward"].keys() == {"before_ppo", "after_ppo"}
    assert sorted(history(folder.path / "runs/grpo", "ppo")) == [1, 2, 3]


def test_generate(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy answer of the job's last evaluation is what generation without training says, token by token."""
    folder.run("grpo")
    close = LLM.close
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "close", lambda self: None)  # its server is asked once more
        found = folder.run("generate", ends=False)
    assert len(found["outputs"]) == 8
    assert {len(output.outputs) for output in found["outputs"]} == {4}
    assert 0 <= found["mean"] <= found["best"] <= 1
    assert found["reply"].prompt == "\n\nHuman: Tell me two things about the cat.\n\nAssistant:"
    answers = read(folder.path / "runs/grpo", evaluation=True)
    assert [answer["version"] for answer in answers] == [3] * 8
    drawn = found["llm"].generate([a["prompt"] for a in answers], SamplingParams(temperature=0.0, max_tokens=48))
    close(found["llm"])
    assert folder.left() == []
    said = [found["llm"].tokenizer.decode(output.outputs[0].token_ids) for output in drawn]
    assert said == [answer["response"] for answer in answers]
    assert [len(output.outputs[0].token_ids) for output in drawn] == [answer["tokens"] for answer in answers]


def test_distillation(folder: Folder) -> None:
    folder.run("distillation")
    rows = history(folder.path / "runs/distillation", "ppo")
    assert sorted(rows) == [1, 2, 3, 4]
    assert rows[1]["kl"] != 0, "student and teacher are two models"
    assert all(abs(row["kl"]) < 5 for row in rows.values()), "and the student stays near its teacher"


def test_own_reward(folder: Folder) -> None:
    scores = folder.run("own_reward")["experience"].scores
    rows = history(folder.path / "runs/own-reward", "ppo")
    assert rows[2]["reward"] == pytest.approx(float(scores.mean()))
    assert json.loads((folder.path / "runs/own-reward/summary.json").read_text())["state"] == "succeeded"
