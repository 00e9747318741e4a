"""The source of each model of a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dovetail.manifest.sizes import shares_body
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.messages import ModelRef


class ModelSources:
    """The weights from which each model starts. They are a folder or a random initialisation, and depend on the stages
    that the job runs."""

    def __init__(
        self, spec: RLHFJobSpec, run_dir: Path, own: Callable[[str], ModelRef | None], has_reward_model: bool
    ) -> None:
        """`own(name)` returns the source that the manifest gives the model, or None."""
        self._stages = spec.stages
        self._shares_body = shares_body(spec)
        self._has_reward_model = has_reward_model
        self._models = run_dir / "models"
        self._tokenizer = str(run_dir / "tokenizer")
        self._own = own

    def actor(self) -> ModelRef:
        """The actor before SFT. Raises ValueError if the manifest names no source for it."""
        own = self._own("actor")
        if own is None:
            raise ValueError("spec.models.actor.source is missing")
        return own

    def actor_for_ppo(self) -> ModelRef:
        """The actor before PPO or DPO. It is SFT's result if the job runs SFT."""
        return self._trained("sft", "lm") if Stage.SFT in self._stages else self.actor()

    def policy(self) -> ModelRef:
        """The model that PPO trains as the actor. It is `actor_for_ppo`, with a value head if actor and critic share
        one body."""
        head = "lm+value" if self._shares_body else "lm"
        return self.actor_for_ppo().model_copy(update={"head": head})

    def reward(self) -> ModelRef:
        """The reward model before its training. It is its own source, or else the actor after SFT with a new head."""
        return self._own("reward") or self._with_value_head(self.actor_for_ppo())

    def reward_for_ppo(self) -> ModelRef:
        """The reward model that PPO uses. It is the trained one if the job trains it."""
        return self._trained("reward", "value") if Stage.REWARD in self._stages else self.reward()

    def critic(self) -> ModelRef:
        """The critic before PPO. It is its own source, or else the reward model, or else the actor with a new head."""
        if self._has_reward_model:
            return self._own("critic") or self.reward_for_ppo()
        return self._own("critic") or self._with_value_head(self.actor_for_ppo())

    def reference(self) -> ModelRef:
        """The frozen reference. It is its own source, or else the actor before PPO."""
        return self._own("reference") or self.actor_for_ppo()

    def _trained(self, name: str, head: str) -> ModelRef:
        path = str(self._models / name)
        return ModelRef.model_validate({"head": head, "path": path, "tokenizer": self._tokenizer})

    @staticmethod
    def _with_value_head(ref: ModelRef) -> ModelRef:
        return ref.model_copy(update={"head": "value"})
