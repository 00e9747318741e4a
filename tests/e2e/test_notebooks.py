"""The notebooks of examples/notebooks, as they are: each begins with what the ones before it left in the folder."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.coordinator.reporting.sample_texts import read
from dovetail.local.llm import LLM, SamplingParams
from dovetail.tools.serving import served_result
from helpers import vllm_cli
from helpers.jobs import history, summary
from helpers.nursery import forked_jobs

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
pytestmark = pytest.mark.slow


BEFORE = dict.fromkeys(["preferences", "ppo", "grpo", "own_reward"], "sft") | dict.fromkeys(
    ["distillation", "generate"], "grpo"
)


async def in_a_kernel(path: Path) -> dict[str, Any]:
    """The names that the code cells define. As in a kernel of Jupyter, their thread has an event loop that runs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
    return names


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

    def run(self, name: str) -> dict[str, Any]:
        """The names that the notebook defined. It has ended all that it started."""
        if name in BEFORE:
            self.run(BEFORE[name])
        if name not in self._found:
            self._found[name] = asyncio.run(in_a_kernel(NOTEBOOKS / f"{name}.ipynb"))
            assert self.left() == []
        return self._found[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("notebooks")
    with pytest.MonkeyPatch.context() as patch, forked_jobs():
        patch.chdir(path)
        patch.setattr(served_result, "ExecSpawner", vllm_cli.VLLMSpawner)
        yield Folder(path)


def test_every_notebook_is_run_here_and_is_short() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {"sft", *BEFORE}
    for path in NOTEBOOKS.glob("*.ipynb"):
        book = json.loads(path.read_text())
        assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
        first, *cells = book["cells"]
        assert first["cell_type"] == "markdown"
        assert first["source"][0].startswith("# ")
        assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code"), "committed without outputs"
        assert sum(len(cell["source"]) for cell in book["cells"]) <= 42, path.name


def test_sft(folder: Folder) -> None:
    found = folder.run("sft")["summary"]["sft"]
    assert found["loss_after"] < found["loss_before"] - 1
    assert (folder.path / "runs/sft/models/sft/model.safetensors").is_file()


@pytest.mark.nightly
def test_preferences(folder: Folder) -> None:
    found = folder.run("preferences")["dpo"]
    assert found["loss_after"] < found["loss_before"]
    assert found == summary(folder.path / "runs/dpo")["dpo"]


@pytest.mark.nightly
def test_ppo(folder: Folder) -> None:
    folder.run("ppo")
    rows = history(folder.path / "runs/ppo", "ppo")
    assert sorted(rows) == [1, 2]
    assert all(math.isfinite(row["reward"]) and row["value_loss"] > 0 for row in rows.values())


@pytest.mark.nightly
def test_grpo(folder: Folder) -> None:
    """A reader sees the held-out reward rise, by more than both intervals."""
    reward = folder.run("grpo")["summary"]["evaluation"]["reward"]
    before, after = reward["before_ppo"], reward["after_ppo"]
    assert after["mean"] - after["ci95"] > before["mean"] + before["ci95"]


@pytest.mark.nightly
def test_generate(folder: Folder) -> None:
    found = folder.run("generate")
    assert len(found["outputs"]) == 8
    assert {len(output.outputs) for output in found["outputs"]} == {4}
    assert 0 <= found["mean"] <= found["best"] <= 1
    assert found["reply"].prompt == "\n\nHuman: Tell me two things about the cat.\n\nAssistant:"


@pytest.mark.nightly
def test_generation_without_training_says_what_the_jobs_last_evaluation_said(folder: Folder) -> None:
    """Token by token: the answers of ppo.ipynb's evaluation are greedy."""
    folder.run("ppo")
    answers = read(folder.path / "runs/ppo", evaluation=True)
    assert [answer["version"] for answer in answers] == [2] * 8
    with LLM("runs/ppo", model="actor") as llm:
        drawn = llm.generate([a["prompt"] for a in answers], SamplingParams(temperature=0.0, max_tokens=48))
        said = [llm.tokenizer.decode(output.outputs[0].token_ids) for output in drawn]
    assert folder.left() == []
    assert said == [answer["response"] for answer in answers]
    assert [len(output.outputs[0].token_ids) for output in drawn] == [answer["tokens"] for answer in answers]


@pytest.mark.nightly
def test_distillation(folder: Folder) -> None:
    folder.run("distillation")
    rows = history(folder.path / "runs/distillation", "ppo")
    assert sorted(rows) == [1, 2, 3, 4]
    assert 0 < rows[4]["kl"] < rows[1]["kl"], "the student comes nearer to its teacher"


@pytest.mark.nightly
def test_own_reward(folder: Folder) -> None:
    scores = folder.run("own_reward")["experience"].scores
    rows = history(folder.path / "runs/own-reward", "ppo")
    assert rows[2]["reward"] == pytest.approx(float(scores.mean()))
    assert json.loads((folder.path / "runs/own-reward/summary.json").read_text())["state"] == "succeeded"
