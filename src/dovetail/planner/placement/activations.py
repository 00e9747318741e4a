"""Computes the activations of PPO's micro-batches on each pipeline stage, and checks the manifest's limit on them
(`plan.activationMemory`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dovetail.manifest.checks.batching import micro_batch_tokens
from dovetail.manifest.types import Dtype, RLHFJobSpec, Stage
from dovetail.planner.costs.memory import GIB, training_memory
from dovetail.planner.placement.placed import Infeasible, Placed
from dovetail.planner.placement.planned_job import PlannedJob


def activation_bytes(job: PlannedJob, placed: Placed, chunks: int | None = None) -> dict[str, list[int]]:
    """The bytes that autograd keeps of one micro-batch of the longest sequences, by trained model and by pipeline rank.
    The result is empty if a model's configuration is not known.

    `placed`: the layouts, and the models with activation checkpointing. `chunks`: the number of stages of each rank. If
    it is given, the result is by stage. Raises ConfigError."""
    layouts = placed.layouts_in(Stage.PPO)
    rules = [rule for rule in job.rules if rule.stage is Stage.PPO]
    if job.shapes is None or any(job.shape(rule.model).layers < layouts[rule.model].pp for rule in rules):
        return {}
    dtype = Dtype.BFLOAT16 if job.trains_on_gpus else Dtype.FLOAT32
    found = {}
    for rule in rules:
        share = job.share(rule, layouts[rule.model], recompute=(Stage.PPO, rule.model) in placed.recompute)
        training = job.training(rule, share, dtype)
        if chunks is not None:
            # A stage keeps the same, whether its rank has other stages or not.
            stages = training.layout.model_copy(update={"pp": training.layout.pp * chunks})
            training = replace(training, layout=stages, chunks=1)
        training = replace(training, in_flight=1)
        memory = (training_memory(training, stage) for stage in range(training.layout.pp))
        found[rule.model] = [round(part.device["activations"]) for part in memory]
    return found


def check_limit(spec: RLHFJobSpec, sizes: Mapping[str, list[int]]) -> None:
    """Raises Infeasible if spec.plan.activationMemory is below the largest micro-batch on a stage. Even a schedule with
    one micro-batch at a time needs that much. `sizes`: as `activation_bytes` gives them."""
    limit = spec.plan.activation_memory
    if limit is None or not sizes:
        return
    least, model, stage = max((size, m, stage) for m, each in sizes.items() for stage, size in enumerate(each))
    if limit * GIB < least:
        tokens = spec.data.max_prompt_tokens + spec.generation.max_tokens
        never = "set spec.plan.recompute to Auto, " if spec.plan.recompute == "Never" else ""
        what, field = f"{spec.ppo.micro_batch_size} sequences of {tokens} tokens hold", "microBatchSize"
        if (most := micro_batch_tokens(spec, Stage.PPO)) is not None:
            what, field = f"a micro-batch of {most} tokens holds", "microBatchTokens"
        raise Infeasible(
            f"spec.plan.activationMemory is {limit:g} GiB, but {what} {_up(least / GIB)} GiB on stage {stage} of the "
            f"{model}, the least that any schedule needs; {never}raise it, or lower spec.ppo.{field}"
        )


def beyond_limit(spec: RLHFJobSpec, sizes: Mapping[str, list[int]]) -> set[str]:
    """The models whose micro-batch needs more than spec.plan.activationMemory."""
    limit = spec.plan.activation_memory
    return set() if limit is None else {model for model, each in sizes.items() if max(each) > limit * GIB}


def _up(value: float) -> str:
    """The value with three digits, rounded up."""
    shown = f"{value:.3g}"
    return shown if float(shown) >= value else f"{value * 1.005:.3g}"
