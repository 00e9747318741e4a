"""What both systems are told. Standard library only: read in both virtual environments."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """One PPO configuration, in the names that both systems share.

    `iterations` includes the `warmup` ones, which are not measured. `mini_batches`: optimizer steps an epoch."""

    iterations: int = 8
    warmup: int = 2
    batch: int = 64
    prompt_tokens: int = 16
    max_new_tokens: int = 128
    mini_batches: int = 4
    epochs: int = 1
    learning_rate: float = 3e-6
    kl_coef: float = 0.05
    clip: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    seed: int = 0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Settings:
        return Settings(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Folder:
    """Where the models and prompts of the benchmark lie."""

    path: Path

    @property
    def actor(self) -> Path:
        return self.path / "actor"

    @property
    def reward(self) -> Path:
        return self.path / "reward"

    @property
    def critic(self) -> Path:
        return self.path / "critic"

    @property
    def prompts(self) -> Path:
        return self.path / "prompts.jsonl"

    def texts(self) -> list[str]:
        """The prompts, one a sample of an iteration: every iteration uses all of them."""
        return [json.loads(line)["prompt"] for line in self.prompts.read_text().splitlines()]
