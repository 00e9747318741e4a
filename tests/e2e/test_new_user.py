"""The commands of docs/own-data.md in their order, by processes of their own as a user starts them: from a model,
a file of prompts and a function to a trained model that was evaluated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dovetail.coordinator.data.text import tokenizer as tokenizers
from helpers.finished_runs import report_answers
from helpers.free_ports import free_port
from helpers.patience import PATIENCE
from helpers.vllm_servers import tiny_llama

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200"}
NUMBERS = [(a, b) for a in range(8) for b in range(8)]
# The page's own command, but for the size of the job.
SMALL = ("sft.steps=4", "ppo.iterations=2", "generation.maxTokens=8", "evaluation.heldOut=6")
GRPO = ["--method", "grpo", "--model", "my-model", "--prompts", "prompts.jsonl", "--reward", "rewards:correct"]
GRPO += ["--demonstrations", "demonstrations.jsonl", *(part for one in SMALL for part in ("--set", f"spec.{one}"))]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: a model, records, and the reward function of the page."""
    import torch
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("user")
    tokenizer = tokenizers.train(["What is 0 + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9?"], 300)
    torch.manual_seed(0)
    config = tiny_llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    tokenizer.save_pretrained(folder / "my-model")
    LlamaForCausalLM(config).float().save_pretrained(folder / "my-model")
    asked = [f"What is {a} + {b}?" for a, b in NUMBERS]
    write(
        folder / "prompts.jsonl",
        [{"prompt": q, "answer": str(a + b)} for q, (a, b) in zip(asked, NUMBERS, strict=True)],
    )
    write(
        folder / "demonstrations.jsonl",
        [{"prompt": q, "response": f" {a + b}"} for q, (a, b) in zip(asked, NUMBERS, strict=True)],
    )
    page = (ROOT / "docs/own-data.md").read_text()
    (found,) = re.findall(r"```python\n(def correct.*?)```", page, re.DOTALL)
    (folder / "rewards.py").write_text(found)
    return folder


def dovetail(folder: Path, *arguments: str, seconds: float = PATIENCE) -> str:
    command = [sys.executable, "-m", "dovetail.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def manifest(here: Path) -> Path:
    """What the command without a manifest means."""
    (here / "job.yaml").write_text(dovetail(here, "run", *GRPO, "--cpu", "--print-only"))
    return here / "job.yaml"


@pytest.fixture(scope="module")
def trained(here: Path) -> Path:
    """The run of the command without a manifest."""
    told = dovetail(here, "run", *GRPO, "--cpu", "--run-dir", "runs/mine")
    assert "kind: RLHFJob" in told, "it prints the manifest that it means"
    for command in ("dovetail chat", "dovetail serve", "dovetail push"):
        assert f"{command} runs/mine" in told, "it prints what can be done with the result"
    return here / "runs/mine"


def test_the_data_and_the_job_are_checked_before_it_runs(here: Path, manifest: Path) -> None:
    seen = dovetail(here, "data", "prompts.jsonl", "--model", "my-model", "--as", "prompts")
    assert re.search(r"Records +64\b", seen)
    checked = " ".join(dovetail(here, "validate", manifest.name, "--deep").split())
    assert "correct gave finite numbers for two prompts" in checked
    assert "is valid" in checked


@pytest.mark.nightly
def test_a_model_is_measured_for_schedules(here: Path, manifest: Path, tmp_path: Path) -> None:
    small = ("--repeats", "1", "--no-link", "--micro-batch", "1", "--tokens", "8")
    dovetail(here, "profile", manifest.name, "-o", str(tmp_path / "profile.json"), *small)
    assert json.loads((tmp_path / "profile.json").read_text())["models"]["actor"]


def test_the_same_prompts_are_answered_before_sft_after_sft_and_after_grpo(trained: Path) -> None:
    facts = json.loads((trained / "summary.json").read_text())
    assert facts["state"] == "succeeded"
    assert set(facts["evaluation"]["reward"]) == {"before_sft", "before_ppo", "after_ppo"}
    answers = []
    for version in ("-1", "0", "2"):
        told = dovetail(trained.parent, "samples", "mine", "--evaluation", "-i", version, "--all", "--json")
        rows = [json.loads(line) for line in told.splitlines()]
        assert len(rows) == 6
        answers.append({row["prompt"] for row in rows})
    assert answers[0] == answers[1] == answers[2]
    dovetail(trained.parent, "report", "mine")
    found = report_answers(trained)
    assert found["overview"]["evaluations"] == [-1, 0, 2]
    asked = [{row["asked"] for row in found[f"evaluation/{version}"]["rows"]} for version in (-1, 0, 2)]
    assert len(asked[0]) == 6
    assert asked[0] == asked[1] == asked[2]


def test_what_a_run_leaves_for_others(trained: Path) -> None:
    model = trained / "models/actor"
    card = (model / "README.md").read_text()
    for part in ("kind: RLHFJob", "prompts.jsonl", "held-out answers, by SFT"):
        assert part in card
    assert (model / "generation_config.json").exists()
    assert str(trained) not in card, "no folders of the user's machine"


def test_the_page_of_the_runs_is_served(trained: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "dovetail.cli.main", "ui", str(trained.parent), "--port", str(port), "--no-open"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline().decode()
            found = re.search(rf"http://127.0.0.1:{port}/\S+", told)
            assert found is not None, told
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with browser.open(found[0], timeout=60) as reply:
                assert b"<html" in reply.read()
        finally:
            process.terminate()
            process.wait(PATIENCE)
