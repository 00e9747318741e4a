"""The memory job of a trained model: what a rank of one of its stages holds, as the manifest says."""

from __future__ import annotations

from dovetail.manifest.checks.batching import BatchRule
from dovetail.manifest.critic import shares_body
from dovetail.manifest.types import Dtype, Parallelism, RLHFJobSpec, Stage
from dovetail.planner.costs.memory import Training
from dovetail.planner.shape import Head, ModelShape


def sequence_tokens(spec: RLHFJobSpec, stage: Stage) -> int:
    """Tokens of the longest sequence in a stage."""
    ppo = stage is Stage.PPO
    return spec.data.max_prompt_tokens + spec.generation.max_tokens if ppo else spec.data.max_tokens


def rows(rule: BatchRule) -> int:
    """Sequences of one sample: a preference is a pair of them."""
    return 2 if rule.stage is Stage.REWARD else 1


def training_head(spec: RLHFJobSpec, model: str) -> Head:
    if model != "actor":
        return "value"
    return "lm+value" if shares_body(spec) else "lm"


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
) -> Training:
    """The training of `rule`'s model in `rule`'s stage of the job, as pipeline stage `stage` runs it under 1F1B.

    `dtype`: where the manifest says Auto. `gpu`: whether trainers have GPUs."""
    given = getattr(spec.models, rule.model)
    ppo = rule.stage is Stage.PPO
    count = max(1, rule.batch // (layout.dp * rule.micro))
    averaged = ppo and rule.model == "actor" and spec.ppo.ema is not None
    return Training(
        shape,
        training_head(spec, rule.model),
        layout,
        dtype if given.dtype is Dtype.AUTO else given.dtype,
        tokens=rule.micro * rows(rule) * sequence_tokens(spec, rule.stage),
        micro_batches=count,
        in_flight=max(1, min(layout.pp - stage, count)),
        lora=given.lora,
        recompute=recompute,
        offload=_offload(spec, rule),
        ema=None if not averaged else "host" if gpu else "device",
        gpu=gpu,
    )


def _offload(spec: RLHFJobSpec, rule: BatchRule) -> bool:
    if rule.stage is Stage.PPO:
        return spec.ppo.actor_optimizer.offload if rule.model == "actor" else spec.ppo.critic_optimizer.offload
    return (spec.sft if rule.stage is Stage.SFT else spec.reward).optimizer.offload
