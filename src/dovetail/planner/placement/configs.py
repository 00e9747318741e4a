"""Finds the shapes of a job's models, from the manifest and their own configurations, and describes their training for
the memory model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.manifest.checks.batching import BatchRule, longest_sample
from dovetail.manifest.critic import has_critic, shares_body
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.types import Dtype, ModelSource, Parallelism, RLHFJobSpec, Stage
from dovetail.planner import candidate
from dovetail.planner.costs.memory import Training
from dovetail.planner.shape import Head, ModelShape, ShapeError

# For each model, the models whose source it may start from, in order.
_FROM = {
    "actor": ("actor",),
    "reference": ("reference", "actor"),
    "reward": ("reward", "actor"),
    "critic": ("critic", "reward", "actor"),
}


class ConfigError(ValueError):
    """A model configuration cannot be read. The message is one sentence that names the field."""


def owner(spec: RLHFJobSpec, model: str) -> str | None:
    """The model whose source `model` starts from. None if none of them has a source."""
    return next((name for name in _FROM[model] if getattr(spec.models, name).source is not None), None)


def shapes(spec: RLHFJobSpec, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, ModelShape] | None:
    """The shapes of actor, reference, reward and critic, as far as the job has them. None if the configuration of one
    is not known.

    `configs`: `config.json` by the model that names the source. Models from scratch need none. Raises ConfigError."""
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


# ------------------------------------------------------------ their training


def sequence_tokens(spec: RLHFJobSpec, stage: Stage) -> int:
    """The tokens of the longest sequence in a stage."""
    return longest_sample(spec, stage) // (2 if stage.has_pairs else 1)


def rows(rule: BatchRule) -> int:
    """The sequences of one sample. A preference has two."""
    return 2 if rule.stage.has_pairs else 1


def training_head(spec: RLHFJobSpec, model: str) -> Head:
    if model != "actor":
        return "value"
    return "lm+value" if shares_body(spec) else "lm"


def pipelines_of(spec: RLHFJobSpec, stage: Stage, layouts: Mapping[str, Parallelism], model: str) -> int:
    """The number of pipelines of a model that are side by side in a stage of the job. It is more than 1 only in PPO, if
    actor and critic have different numbers of stages on the same ranks. `layouts`: those of the stage's models."""
    other = layouts.get({"actor": "critic", "critic": "actor"}.get(model, ""))
    if stage is not Stage.PPO or other is None or spec.ppo.micro_batch_tokens is not None:
        return 1
    mine = layouts[model]
    if getattr(mine, "first", 0) or getattr(other, "first", 0):
        return 1  # each has ranks of its own
    return candidate.pipelines(mine.pp, other.pp, mine.dp)


def training_job(
    spec: RLHFJobSpec,
    rule: BatchRule,
    shape: ModelShape,
    layout: Parallelism,
    dtype: Dtype,
    *,
    gpu: bool = True,
    stage: int = 0,
    recompute: bool = False,
    by_layer: bool = False,
    pipelines: int = 1,
    chunks: int | None = None,
) -> Training:
    """The training of `rule`'s model in `rule`'s stage of the job, as pipeline stage `stage` runs it under 1F1B.

    `dtype`: the dtype if the manifest says Auto. `gpu`: whether trainers have GPUs. `by_layer`: it runs under ZeRO-3.
    `pipelines`: see `pipelines_of`. `chunks`: the stages of PPO's models on a rank. By default the manifest decides."""
    given = getattr(spec.models, rule.model)
    ppo = rule.stage is Stage.PPO
    tokens = rule.micro * rows(rule) * sequence_tokens(spec, rule.stage)
    outputs = rule.micro * spec.generation.max_tokens
    count = max(1, rule.batch // (layout.dp * rule.micro))
    if rule.tokens is not None:
        tokens = outputs = min(rule.tokens, count * tokens)
        count = math.ceil(count * rows(rule) * sequence_tokens(spec, rule.stage) / tokens)
    chunks = (chunks or spec.plan.chunks) if ppo and layout.pp > 1 else 1
    return Training(
        shape,
        training_head(spec, rule.model),
        layout,
        dtype if given.dtype is Dtype.AUTO else given.dtype,
        tokens=tokens,
        micro_batches=count,
        in_flight=max(1, min(layout.pp - (stage if chunks == 1 else 0), count)),
        lora=given.lora,
        recompute=recompute,
        offload=_offload(spec, rule),
        ema=ppo and rule.model == "actor" and spec.ppo.ema is not None,
        gpu=gpu,
        fsdp=3 if by_layer and layout.dp > pipelines else 2,
        kept=spec.ppo.kept_versions if ppo else 0,
        outputs=outputs if ppo else None,
        chunks=chunks,
        pipelines=pipelines,
    )


def _offload(spec: RLHFJobSpec, rule: BatchRule) -> bool:
    if rule.stage is Stage.PPO:
        return spec.ppo.actor_optimizer.offload if rule.model == "actor" else spec.ppo.critic_optimizer.offload
    return spec.supervised(rule.stage).optimizer.offload
