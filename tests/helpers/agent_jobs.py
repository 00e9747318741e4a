"""Jobs that learn the task of examples/agent.yaml, with a tiny model that SFT has taught to call the tool."""

from __future__ import annotations

import fcntl
import runpy
import shutil
from pathlib import Path
from typing import Any

from helpers.jobs import SMALLER, run_job, tiny_job

CODE = Path(__file__).parents[2] / "examples" / "agent"
ITERATIONS = 3


def write_task(folder: Path) -> None:
    """Write the data of the example into a folder."""
    runpy.run_path(str(CODE / "make.py"))["write_task"](folder)


def taught_task(shared: Path) -> Path:
    """A folder in `shared` with the data of the example and an `actor`, a model that SFT has taught the format of its
    calls. The first of all processes that ask trains it."""
    made = shared / "taught"
    with (shared / "taught.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "actor").exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            write_task(made)
            outcome, _ = run_job(sft_job(made), shared / "teaching")
            assert outcome.succeeded, outcome.reason
            (shared / "teaching" / "models" / "sft").rename(made / "actor")
            shutil.rmtree(shared / "teaching")
    return made


def sft_job(folder: Path) -> Any:
    """A job that learns the demonstrations in `folder`."""
    return tiny_job(
        stages=["sft"],
        sft={"steps": 100, "batchSize": 32, "microBatchSize": 16, "optimizer": {"learningRate": 5.0e-3}},
        models={
            "actor": {"source": {"scratch": {"architecture": "llama", "config": CONFIG}}},
            "tokenizer": {"path": str(folder / "tokenizer")},
        },
        data={
            "demonstrations": [{"path": str(folder / "demonstrations.jsonl")}],
            "prompts": [],
            "preferences": [],
            "maxPromptTokens": 64,
            "maxTokens": 192,
        },
        groups=[{"name": "trainers", "roles": ["trainer"], "replicas": 1}],
        checkpoint={"everySteps": 100},
    )


def agent_job(folder: Path, reward: dict[str, Any] | None = None, **ppo: Any) -> Any:
    """A job whose taught actor learns the task in `folder`."""
    spec: dict[str, Any] = {
        **SMALLER,
        "stages": ["ppo"],
        "models": {
            "actor": {"source": {"path": str(folder / "actor")}},
            "tokenizer": {"path": str(folder / "tokenizer")},
            "reward": reward or {"function": "boxes:right", "importPath": str(CODE), "workers": 1},
        },
        "data": {
            "demonstrations": [],
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
