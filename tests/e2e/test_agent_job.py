"""Jobs whose samples are episodes, with real servers: what they drew is what is trained, whatever dies meanwhile."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.store.store import Store
from dovetail.manifest.checks.validation import load_manifest
from dovetail.tools.run_audit import audit_run
from helpers.jobs import SMALLER, Fault, Injector, history, run_job, same_weights, stored_samples, tiny_job, untrained

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.yaml"
CODE = EXAMPLE.parent / "agent"
ITERATIONS = 3


def write_task(folder: Path) -> None:
    """Write the data of the example into a folder."""
    runpy.run_path(str(CODE / "make.py"))["write_task"](folder)


def test_the_example_begins(tmp_path: Path) -> None:
    """Its data fits its manifest, and its environment answers a call in the template's own format."""
    shutil.copy(EXAMPLE, tmp_path)
    shutil.copytree(CODE, tmp_path / "agent", ignore=shutil.ignore_patterns("*.jsonl", "tokenizer"))
    write_task(tmp_path / "agent")
    result = CliRunner().invoke(cli, ["validate", str(tmp_path / EXAMPLE.name), "--deep"])
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert 'assistant: open({"box": "a"}) | tool: error: there is no such box' in told


@pytest.mark.nightly
def test_the_example_learns_its_task(tmp_path: Path) -> None:
    shutil.copytree(CODE, tmp_path / "agent")
    write_task(tmp_path / "agent")
    shutil.copy(EXAMPLE, tmp_path)
    outcome, _ = run_job(load_manifest(tmp_path / EXAMPLE.name), tmp_path / "run")
    assert outcome.succeeded, outcome.reason
    rewards = [row["reward"] for _, row in sorted(history(tmp_path / "run", "ppo").items())]
    assert rewards[0] < 0.3
    assert np.mean(rewards[-10:]) > 0.9, rewards


def agent_job(folder: Path, **ppo: Any) -> Any:
    """A job that learns the task in `folder`."""
    given = {"source": {"scratch": {"architecture": "llama", "config": CONFIG}}}
    return tiny_job(
        **{
            **SMALLER,
            "sft": {"steps": 100, "batchSize": 32, "microBatchSize": 16, "optimizer": {"learningRate": 5.0e-3}},
        },
        stages=["sft", "ppo"],
        models={
            "actor": given,
            "tokenizer": {"path": str(folder / "tokenizer")},
            "reward": {"function": "boxes:right", "importPath": str(CODE), "workers": 1},
        },
        data={
            "demonstrations": [{"path": str(folder / "demonstrations.jsonl")}],
            "prompts": [{"path": str(folder / "prompts.jsonl")}],
            "preferences": [],
            "maxPromptTokens": 64,
            "maxTokens": 192,
        },
        sessions={"environment": {"function": "boxes:Boxes"}, "maxTurns": 3, "sandbox": "None"},
        generation={"maxTokens": 64},
        evaluation={"heldOut": 0},
        ppo={"iterations": ITERATIONS, "samplesPerPrompt": 4, "miniBatchSize": 16, **ppo},
        checkpoint={"everySteps": 1, "keep": ITERATIONS},
    )


CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def drawing(iteration: int) -> Any:
    """Whether samples of an iteration, or of one after it, are drawn."""
    return lambda status: (
        status["stage"] == "ppo" and status["phase"] == "generation" and status["iteration"] >= iteration - 1
    )


def episodes(run: Path, iteration: int) -> list[Any]:
    store = Store(run)
    try:
        found = store.episodes.of(iteration)
    finally:
        store.close()
    return [(key, e.ending, e.messages, e.turns, e.calls, e.learnt.tolist()) for key, e in found.items()]


def audited(run: Path) -> tuple[dict[str, int], dict[str, int]]:
    """What became of a run's episodes, and what they did."""
    found = audit_run(run).found
    return found.samples, dict(found.counts)


@pytest.mark.parametrize(
    "ppo",
    [{"advantage": "grpo"}, pytest.param({"advantage": "gae", "lag": 1}, marks=pytest.mark.nightly)],
    ids=["grpo", "gae with a lag"],
)
def test_whatever_dies_the_episodes_and_the_weights_are_the_same(tmp_path: Path, ppo: dict[str, Any]) -> None:
    write_task(tmp_path)
    job = agent_job(tmp_path, **ppo)
    outcome, _ = run_job(job, tmp_path / "whole")
    assert outcome.succeeded, outcome.reason
    metrics = history(tmp_path / "whole", "ppo")
    for row in metrics.values():
        assert row["episode_calls"] > 0, "the model calls tools"
        assert 1 < row["episode_turns"] <= 3
        assert row["episodes_discarded"] == 0
        if "lag" not in ppo:
            assert row["mismatch_abs"] < 1e-4, "what the servers sampled is what is trained"
    killer = Injector(
        [
            *(Fault("coordinator", drawing(number)) for number in (1, 2)),
            Fault("rollouts-0", drawing(2)),
            Fault("trainer-1", drawing(3)),
            Fault("coordinator", drawing(3)),
        ]
    )
    outcome, _ = run_job(job, tmp_path / "killed", killer)
    assert outcome.succeeded, outcome.reason
    assert [fault for fault in killer.faults if not fault.done] == []
    last = ITERATIONS
    whole, killed = (stored_samples(tmp_path / name, last) for name in ("whole", "killed"))
    assert [s.tokens.tolist() for s in killed] == [s.tokens.tolist() for s in whole]
    assert episodes(tmp_path / "killed", last) == episodes(tmp_path / "whole", last)
    assert same_weights(tmp_path / "whole", tmp_path / "killed") == []
    for name in ("whole", "killed"):
        assert untrained(tmp_path / name) == []
    assert audited(tmp_path / "killed") == audited(tmp_path / "whole")
