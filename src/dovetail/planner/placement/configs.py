"""The shapes of a job's models, from what its manifest and its models' own configurations say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.manifest.critic import has_critic
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.types import ModelSource, RLHFJobSpec, Stage
from dovetail.planner.shape import ModelShape, ShapeError

# Where a model comes from that has no source of its own.
_FROM = {
    "actor": ("actor",),
    "reference": ("reference", "actor"),
    "reward": ("reward", "actor"),
    "critic": ("critic", "reward", "actor"),
}


class ConfigError(ValueError):
    """A model configuration that cannot be read; one sentence that names the field."""


def owner(spec: RLHFJobSpec, model: str) -> str | None:
    """The model whose source `model` starts from; None if none has one."""
    return next((name for name in _FROM[model] if getattr(spec.models, name).source is not None), None)


def shapes(spec: RLHFJobSpec, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, ModelShape] | None:
    """Of actor, reference, reward and critic, as far as the job has them; None where one's configuration is not known.

    `configs`: `config.json` by the model that names the source; models from scratch need none. Raises ConfigError."""
    found = {}
    for model in ("actor", "reference", "reward", "critic"):
        if not needed(spec, model):
            continue
        name = owner(spec, model)
        source = getattr(spec.models, name).source if name is not None else None
        config = None if source is None else _scratch(spec, source) or configs.get(str(name))
        if config is None:
            return None
        try:
            found[model] = ModelShape.of(config)
        except ShapeError as error:
            raise ConfigError(f"spec.models.{name}.source: {error}") from error
    return found


def needed(spec: RLHFJobSpec, model: str) -> bool:
    """Whether the job runs the model."""
    ppo = Stage.PPO in spec.stages
    if model == "reward":
        return Stage.REWARD in spec.stages or (ppo and not spec.models.reward.calls)
    return {"actor": True, "reference": ppo, "critic": ppo and has_critic(spec)}[model]


def _scratch(spec: RLHFJobSpec, source: ModelSource) -> dict[str, Any] | None:
    if source.scratch is None:
        return None
    made = source.scratch
    trained = spec.models.tokenizer.train
    vocabulary = {} if trained is None else {"vocab_size": trained.vocab_size}
    return {**MODEL_FAMILIES[made.architecture].defaults, **made.config, **vocabulary, "model_type": made.architecture}
