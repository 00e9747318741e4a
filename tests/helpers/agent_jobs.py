"""Jobs that learn the task of examples/agent.yaml, with a tiny model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from helpers.jobs import SMALLER, tiny_job

CODE = Path(__file__).parents[2] / "examples" / "agent"
ITERATIONS = 3


def write_task(folder: Path) -> None:
    """Write the data of the example into a folder."""
    runpy.run_path(str(CODE / "make.py"))["write_task"](folder)


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
