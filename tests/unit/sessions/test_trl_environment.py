"""An environment that was written for TRL's GRPOTrainer is one of ours as it is, with the same tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.sessions.python_environment import EnvironmentClass
from helpers.chat_templates import byte_tokens, said, shipped, with_ends
from helpers.tiny_qwen import save_tiny_qwen

pytestmark = pytest.mark.slow


class Base:
    def look(self) -> str:
        """Look at the counter."""
        return str(self.value)

    value = 0


class Counter(Base):
    """As TRL's documentation has them: `reset` takes the whole record, and the environment owns the reward."""

    def __init__(self) -> None:
        self.value = -1

    def reset(self, prompt: list[dict[str, str]], target: int, **fields: Any) -> str | None:
        self.value, self.target, self.asked = 0, target, prompt[-1]["content"]
        return f"Count to {target}."

    async def increment(self, times: int = 1) -> int:
        """Increment the counter.

        Args:
            times: How often.
        """
        self.value += times
        return self.value

    @property
    def far(self) -> int:
        raise RuntimeError("a property is no tool")

    async def get_reward(self) -> float:
        return float(self.value == self.target)


def test_a_class_of_trl_has_the_same_tools_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from transformers.utils import get_json_schema
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    save_tiny_qwen(tmp_path / "model")
    records = [{"prompt": [said("user", "Count.")], "target": 2}] * 2
    config = GRPOConfig(tmp_path / "out", use_cpu=True, num_generations=2, per_device_train_batch_size=2, report_to=[])
    theirs = GRPOTrainer(
        str(tmp_path / "model"),
        args=config,
        train_dataset=Dataset.from_list(records),
        processing_class=with_ends(byte_tokens(), shipped()["trl: qwen3"][0]),
        environment_factory=Counter,
    )
    ours = EnvironmentClass(Counter, "tests:Counter")
    by_name = {tool["function"]["name"]: tool for tool in ours.tools}
    assert by_name == {tool.__name__: get_json_schema(tool) for tool in theirs.tools}
    assert set(by_name) == {"look", "increment"}


def test_it_is_played_as_trl_plays_it() -> None:
    async def play() -> tuple[str, list[str], float | None]:
        episode = await EnvironmentClass(Counter, "tests:Counter").begin(
            {"prompt": [said("user", "Count.")], "target": 2, "source": "a field that it does not name"}
        )
        told = [await episode.make("look", {}), await episode.make("increment", {"times": 2})]
        return episode.observation, told, await episode.reward()

    assert asyncio.run(play()) == ("Count to 2.", ["0", "2"], 1.0)
