"""Jobs whose samples are episodes, with real servers: what they drew is what is trained, whatever dies meanwhile."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.store.store import Store
from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.types import RLHFJob
from dovetail.tools.run_audit import audit_run
from helpers.jobs import SMALLER, Fault, Injector, history, run_job, same_weights, stored_samples, tiny_job, untrained
from helpers.whole_lines import whole_lines

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


def agent_job(folder: Path, reward: dict[str, Any] | None = None, **ppo: Any) -> Any:
    """A job that learns the task in `folder`."""
    spec: dict[str, Any] = {
        **SMALLER,
        "sft": {"steps": 100, "batchSize": 32, "microBatchSize": 16, "optimizer": {"learningRate": 5.0e-3}},
        "stages": ["sft", "ppo"],
        "models": {
            "actor": {"source": {"scratch": {"architecture": "llama", "config": CONFIG}}},
            "tokenizer": {"path": str(folder / "tokenizer")},
            "reward": reward or {"function": "boxes:right", "importPath": str(CODE), "workers": 1},
        },
        "data": {
            "demonstrations": [{"path": str(folder / "demonstrations.jsonl")}],
            "prompts": [{"path": str(folder / "prompts.jsonl")}],
            "preferences": [],
            "maxPromptTokens": 64,
            "maxTokens": 192,
        },
        "sessions": {"environment": {"function": "boxes:Boxes"}, "maxTurns": 3, "sandbox": "None"},
        "generation": {"maxTokens": 64},
        "evaluation": {"heldOut": 0},
        "ppo": {"iterations": ITERATIONS, "samplesPerPrompt": 4, "miniBatchSize": 16, **ppo},
        "checkpoint": {"everySteps": 1, "keep": ITERATIONS},
    }
    return tiny_job(**spec)


CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


# An agent with two tools of its own, which imports nothing of ours. The model has eight turns, whatever it says.
AGENT = """
import json, sys
from openai import OpenAI

record, client = json.load(sys.stdin), OpenAI()
tools = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"box": {"type": "string"}}}}} for name in ("open", "close")]
messages, right = list(record["messages"]), 0
for turn in range(8):
    if turn % 2:
        deltas = [c.choices[0].delta for c in client.chat.completions.create(
            model="m", messages=messages, tools=tools, temperature=0.1, stream=True) if c.choices]
        said, calls = "".join(d.content or "" for d in deltas), [c for d in deltas for c in d.tool_calls or []]
    else:
        message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        said, calls = message.content, message.tool_calls or []
    asked = [{"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
             for c in calls]
    messages.append({"role": "assistant", "content": said or "", **({"tool_calls": asked} if asked else {})})
    for call in calls:
        box = json.loads(call.function.arguments).get("box")
        right += box == record["box"]
        found = record["things"].get(box, "nothing") if call.function.name == "open" else "closed"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"a {found}"})
    if not calls:
        messages.append(record["messages"][-1])
client.post("/reward", body={"reward": right / 8}, cast_to=object)
"""


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


def test_an_agent_of_ones_own_trains_and_a_death_changes_no_token(tmp_path: Path) -> None:
    """Eight turns and two tools through the SDK of OpenAI, in a sandbox. The coordinator dies while episodes are
    played."""
    write_task(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "agent.py").write_text(AGENT)
    earned = {"function": "dovetail.coordinator.rewards.earned:earned", "importPath": str(tmp_path), "workers": 1}
    fewer = {"iterations": 2, "samplesPerPrompt": 2, "globalBatchSize": 8, "miniBatchSize": 8}
    document = agent_job(tmp_path, earned, advantage="grpo", **fewer).model_dump(mode="json", by_alias=True)
    document["spec"]["sessions"] = {"agent": {"command": [sys.executable, "agent.py"]}, "maxTokens": 40}
    document["spec"]["generation"] = {"maxTokens": 640}
    job = RLHFJob.model_validate(document)
    outcome, _ = run_job(job, tmp_path / "whole")
    assert outcome.succeeded, outcome.reason
    for row in history(tmp_path / "whole", "ppo").values():
        assert (row["episode_turns"], row["episodes_discarded"]) == (8, 0)
        assert row["episode_calls"] > 0, "the model calls tools"
        assert row["mismatch_abs"] < 1e-4, "what the servers sampled is what is trained"
    events = [json.loads(line) for line in whole_lines(tmp_path / "whole" / "events.jsonl")]
    assert [e["setting"] for e in events if e["event"] == "agent.overruled"] == ["temperature"]
    killer = Injector([Fault("coordinator", drawing(1)), Fault("coordinator", drawing(2))])
    outcome, _ = run_job(job, tmp_path / "killed", killer)
    assert outcome.succeeded, outcome.reason
    assert [fault for fault in killer.faults if not fault.done] == []
    whole, killed = (stored_samples(tmp_path / name, 2) for name in ("whole", "killed"))
    assert [s.tokens.tolist() for s in killed] == [s.tokens.tolist() for s in whole]
    assert episodes(tmp_path / "killed", 2) == episodes(tmp_path / "whole", 2)
    assert same_weights(tmp_path / "whole", tmp_path / "killed") == []
    for name in ("whole", "killed"):
        assert untrained(tmp_path / name) == []
    assert audited(tmp_path / "killed") == audited(tmp_path / "whole")
