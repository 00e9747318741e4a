"""Decides which schedules of actor and critic fit on trainer ranks of GPUs, and how many stages of each a rank may hold
(V-shaped schedules). Computes the activations of PPO's micro-batches on each pipeline stage, and checks the manifest's
limit on them (`plan.activationMemory`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from dovetail.manifest.checks.batching import BatchRule, micro_batch_tokens
from dovetail.manifest.types import Dtype, Parallelism, RLHFJobSpec, Stage
from dovetail.planner.candidate import INFERENCE, Schedule
from dovetail.planner.costs.gpu import Estimate, GPUCosts
from dovetail.planner.costs.memory import GIB, training_memory
from dovetail.planner.placement.placed import Chosen, Infeasible, Placed
from dovetail.planner.placement.planned_job import PlannedJob

# The numbers of stages that are tried: a V, and two of them.
SEVERAL = (2, 4)


def fitting(chosen: Chosen) -> Literal["Auto", "TimeSharing", "Serial"]:
    """The schedules that fit if a placement on GPUs was chosen and the manifest leaves the schedule open. Those that
    run both models at once need the gradients and the gathered weights of both. So a placement may fit only if the
    models take turns, or only if no critic's stage runs against the actor's."""
    ways: tuple[tuple[Schedule, Literal["Auto", "TimeSharing"]], ...] = (
        ("Fused", "Auto"),
        ("TimeSharing", "TimeSharing"),
    )
    for schedule, allowed in ways:
        if chosen.costs.estimate(replace(chosen.candidate, schedule=schedule)).fits:
            return allowed
    return "Serial"


def most_chunks(job: PlannedJob, placed: Placed, schedule: str) -> int:
    """The most stages of each model that PPO's schedules may put on a rank. With `schedule` Auto it is what the job
    permits. Otherwise it is what the manifest pins, or 1.

    Auto puts several stages on a rank only if that works and changes no bit. The models must have the same pipeline of
    several stages, layers that divide evenly, and no dropout, which is drawn by stage. On GPUs the ranks' memory must
    be enough. With activation checkpointing or ZeRO-3 backward passes cannot be split, and no schedule with more than
    two stages has whole ones. A model that trains alone has at most two stages on a rank."""
    spec = job.spec
    if schedule != "Auto":
        return spec.plan.chunks if schedule == "VShaped" else 1
    trained = [model for model in ("actor", "critic") if model in placed.layouts]
    whole = any(stage is Stage.PPO for stage, _ in placed.recompute | placed.by_layer)
    several = SEVERAL[:1] if len(trained) == 1 or whole else SEVERAL
    stages = _even(job, {model: placed.layouts[model] for model in trained}, several)
    if not job.trains_on_gpus:
        return max(stages, default=1)
    return max((c for c in stages if placed.chosen is not None and held(placed.chosen, c).fits), default=1)


def chunks_alone(job: PlannedJob, placed: Placed, rule: BatchRule) -> int:
    """The most stages of a model on a rank in a stage before PPO, or in DPO. It is what the manifest pins, or what the
    job permits. On GPUs it is 1 unless it is pinned: these stages are short, and memory is known with one stage."""
    layout, pin = placed.layouts_in(rule.stage)[rule.model], job.spec.plan.intra_stage_fusion
    if layout.pp == 1 or rule.tokens is not None or pin == "Serial":
        return 1
    if pin == "VShaped":
        layers = job.shape(rule.model).layers if job.shapes is not None else job.layers.get(rule.model)
        return job.spec.plan.chunks if layers is None or layers >= layout.pp * job.spec.plan.chunks else 1
    return 1 if job.trains_on_gpus else max(_even(job, {rule.model: layout}, SEVERAL[:1]), default=1)


def _even(job: PlannedJob, layouts: Mapping[str, Parallelism], several: Sequence[int]) -> list[int]:
    """Which of `several` numbers of stages on a rank divide the layers of all models evenly. The list is empty if the
    models have unlike pipelines or no pipeline, or if adapters have dropout."""
    spec, known, first = job.spec, job.shapes, next(iter(layouts.values()))
    adapters = [getattr(spec.models, model).lora for model in layouts]
    dropout = any(each is not None and each.dropout for each in adapters)
    if any(each != first for each in layouts.values()) or first.pp == 1 or dropout:
        return []
    counts = [known[m].layers if known is not None else job.layers.get(m) for m in layouts]
    return [c for c in several if all(n is not None and n % (first.pp * c) == 0 for n in counts)]


def held(chosen: Chosen, chunks: int) -> Estimate:
    """The estimate of a placement on GPUs if each rank holds `chunks` stages."""
    return _costs(chosen, chunks).estimate(replace(chosen.candidate, schedule="VShaped"))


def server_memory(chosen: Chosen, chunks: int) -> dict[str, float]:
    """The fraction of a GPU's memory for the servers of each group that leaves some to others. The others are trainers
    that keep their state there, and scorers that stay beside a server that is awake. It holds for every number of
    stages on a rank up to `chunks`, because the schedules choose that number."""
    candidate = chosen.candidate
    parts = chosen.costs.memory.server_memory(candidate)
    for count in (c for c in SEVERAL if c <= chunks):
        several = _costs(chosen, count).memory.server_memory(replace(candidate, schedule="VShaped"))
        parts = {share: min(part, several[share]) for share, part in parts.items()}
    training = {share.pool for share in candidate.trained}
    scored = [share for task in INFERENCE for share in candidate.shares(task)]
    found: dict[str, float] = {}
    for share, part in parts.items():
        beside = not share.offload and any(share.overlaps(other) for other in scored)
        if share.pool in training or beside:
            found |= dict.fromkeys(share.pool.split("+"), math.floor(100 * part) / 100)
    return found


def _costs(chosen: Chosen, chunks: int) -> GPUCosts:
    costs = chosen.costs
    return GPUCosts(replace(costs.work, chunks=chunks), costs.inventory, costs.max_samples)


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
