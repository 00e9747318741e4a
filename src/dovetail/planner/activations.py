"""What PPO's micro-batches hold on each pipeline stage, and the manifest's limit on it (`plan.activationMemory`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dovetail.manifest.critic import shares_body
from dovetail.manifest.types import Dtype, Parallelism, RLHFJobSpec, Role
from dovetail.planner.memory import Training, training_memory
from dovetail.planner.memory.parts import GIB
from dovetail.planner.placement.configs import shapes
from dovetail.planner.shape import Head

_HEADS: dict[str, Head] = {"actor": "lm", "critic": "value"}


class LimitError(ValueError):
    """A limit that no schedule can keep to; one sentence with the least that one needs."""


def activation_bytes(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    parallelism: Mapping[str, Parallelism],
    again: Collection[str] = (),
) -> dict[str, list[int]]:
    """By trained model and stage: bytes that autograd keeps of one micro-batch of the longest sequences, by the memory
    model; `again`: models that keep layers' inputs only. {} where a model's configuration is not known. `configs` as
    `make_plan` takes them. Raises ConfigError."""
    known = shapes(spec, configs)
    both = [model for model in _HEADS if model in parallelism]
    if known is None or any(model not in known or known[model].layers < parallelism[model].pp for model in both):
        return {}
    gpu = any(Role.TRAINER in group.roles and not group.on_cpu for group in spec.groups)
    tokens = spec.ppo.micro_batch_size * (spec.data.max_prompt_tokens + spec.generation.max_tokens)
    found = {}
    for model in both:
        given = getattr(spec.models, model)
        dtype = (Dtype.BFLOAT16 if gpu else Dtype.FLOAT32) if given.dtype is Dtype.AUTO else given.dtype
        head: Head = "lm+value" if model == "actor" and shares_body(spec) else _HEADS[model]
        job = Training(
            known[model], head, parallelism[model], dtype, tokens, lora=given.lora, recompute=model in again, gpu=gpu
        )
        memory = (training_memory(job, stage) for stage in range(job.layout.pp))
        found[model] = [round(part.device["activations"]) for part in memory]
    return found


def check_limit(spec: RLHFJobSpec, sizes: Mapping[str, list[int]]) -> None:
    """Raises LimitError where spec.plan.activationMemory is below the largest micro-batch on a stage: a schedule of one
    at a time needs that. `sizes` as `activation_bytes` gives them."""
    limit = spec.plan.activation_memory
    if limit is None or not sizes:
        return
    least, model, stage = max((size, m, stage) for m, each in sizes.items() for stage, size in enumerate(each))
    if limit * GIB < least:
        tokens = spec.data.max_prompt_tokens + spec.generation.max_tokens
        never = "set spec.plan.recompute to Auto, " if spec.plan.recompute == "Never" else ""
        raise LimitError(
            f"spec.plan.activationMemory is {limit:g} GiB, but {spec.ppo.micro_batch_size} sequences of {tokens} "
            f"tokens hold {_up(least / GIB)} GiB on stage {stage} of the {model}, the least that any schedule needs; "
            f"{never}raise it, or lower spec.ppo.microBatchSize"
        )


def beyond_limit(spec: RLHFJobSpec, sizes: Mapping[str, list[int]]) -> set[str]:
    """Models of which one micro-batch is more than spec.plan.activationMemory."""
    limit = spec.plan.activation_memory
    return set() if limit is None else {model for model, each in sizes.items() if max(each) > limit * GIB}


def _up(value: float) -> str:
    """Three digits, rounded up."""
    shown = f"{value:.3g}"
    return shown if float(shown) >= value else f"{value * 1.005:.3g}"
