"""Makes a job's plan. It is the planner's entry point. `placements` (GPUs) or `cpus` lays the job out, and this file
writes the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from dovetail.gpus.gpu_products import GPU
from dovetail.manifest.checks.batching import BatchRule, longest_sample
from dovetail.manifest.critic import has_critic
from dovetail.manifest.resolve import with_lag
from dovetail.manifest.sizes import pod_count, trained_models, trainer_ranks, trainer_world, world_size
from dovetail.manifest.training_types import AUTO_LAG
from dovetail.manifest.types import Group, Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner import cpus, placements
from dovetail.planner.candidate import scorer_models
from dovetail.planner.cpus import pod_memory, too_small
from dovetail.planner.lags import chosen, excluded, with_lags
from dovetail.planner.layouts import (
    ConfigError,
    Infeasible,
    Placed,
    PlannedJob,
    activation_bytes,
    beyond_limit,
    check_limit,
    chunks_alone,
    fitting,
    most_chunks,
    pin_errors,
    place_evenly,
    product_errors,
    product_warnings,
    server_memory,
)
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.plan import Batching, Plan, Rollout, Task, TaskPlacement, TrainerRank, divisions
from dovetail.protocol.prediction import Prediction
from dovetail.protocol.process.process_names import rollout_name, trainer_name


class PlanError(ValueError):
    """No plan fits the manifest. The message is one sentence that names the field."""


FOR_TWO = ("Fused", "TimeSharing", "Dedicated")
"""The values of plan.intraStageFusion that only actor and critic together can have."""
MOST_RANKS = 4096  # the largest pp, tp or dp that a plan's layout may have


def make_plan(
    spec: RLHFJobSpec,
    layers: Mapping[str, int] | None = None,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    measured: Mapping[str, GPU] | None = None,
    profile: Profile | None = None,
    lag: int | None = None,
    zero3: bool | None = None,
) -> Plan:
    """The plan of a manifest that `dovetail.manifest.checks.validation.check` accepts. It is deterministic.

    If all models and their GPUs or CPUs are known, the plan has the fastest layout that fits. Otherwise it has as many
    data-parallel ranks as can share every batch of a model, and pipeline stages for the other ranks.

    `layers[model]`: the most pipeline stages of a model. `configs`: the models' config.json, by the model that names
    the source. Models from scratch need none. `measured`: hardware figures that replace those of the data sheets.
    `profile`: measurements of this machine with whole iterations of these models. `lag`: the lag of the run that the
    plan is for, if `ppo.lag` is Auto. `zero3`: whether PPO has ZeRO-3 in that run, if `plan.zero3` is Auto. Both are
    None if the run has not begun. Raises PlanError."""
    if trained_models(spec) and trainer_world(spec) == 0:
        raise PlanError("spec.groups has no group with the trainer role; add `trainer` to one group's roles")
    if (ranks := trainer_world(spec)) > MOST_RANKS:
        more = "lower replicas or gpu.perPod of the trainer groups"
        raise PlanError(f"spec.groups has {ranks} trainer ranks, and at most {MOST_RANKS} can be planned; {more}")
    if errors := product_errors(spec, measured) + pin_errors(spec):
        raise PlanError(errors[0])

    job = PlannedJob(spec, configs or {}, layers or {}, measured, profile, zero3)

    def planned(lag: int) -> Plan:
        decided = with_lag(spec, lag)
        found = _planned(replace(job, spec=decided), excluded(spec))
        return found.model_copy(update={"lag": decided.ppo.lag})

    try:
        if spec.ppo.lag != AUTO_LAG:
            return planned(spec.ppo.lag)
        if lag is not None:
            return planned(lag).model_copy(update={"lag_reason": "the run began with it"})
        found = planned(0)
        best, reason = chosen(spec, found.prediction)
        return (planned(best) if best else found).model_copy(update={"lag_reason": reason})
    except (Infeasible, ConfigError) as error:
        raise PlanError(str(error)) from error


def _planned(job: PlannedJob, no_lag: str | None) -> Plan:
    """The plan of a job. `no_lag`: why the job cannot have a lag, or None if it can."""
    spec, placed = job.spec, _placed(job)
    checkpointed = _checkpointed(job, placed)
    if placed.chosen is not None and checkpointed - placed.recompute:
        # The predicted layout keeps more activations than spec.plan.activationMemory allows.
        return _planned(job.pinned(recompute="Always"), no_lag)
    placed = replace(placed, recompute=checkpointed, by_layer=_gathered(job, placed))
    schedule = "Dedicated" if placed.dedicated else _schedule(spec, placed.layouts)
    if schedule == "Auto" and placed.chosen is not None and "critic" in placed.layouts:
        schedule = fitting(placed.chosen)
    chunks = most_chunks(job, placed, schedule)
    memory = pod_memory(job, placed, schedule, chunks)
    return Plan(
        world_size=trainer_world(spec),
        parallelism=dict(placed.layouts),
        batching=[_batching(job, rule, placed) for rule in job.rules],
        tasks=_tasks(spec),
        trainers=_trainers(spec),
        rollouts=_rollouts(spec, placed, chunks) if Stage.PPO in spec.stages else [],
        schedule=schedule,
        dedicated=dict(placed.dedicated),
        chunks=chunks,
        activation_bytes=_activations(job, placed),
        warnings=[
            *product_warnings(spec, job.measured),
            *placed.warnings,
            *_useless_pins(spec, placed),
            *too_small(memory),
            *_further_rounds(spec),
        ],
        prediction=_predicted(spec, placed, no_lag),
        stages=list(placed.stages),
        memory=memory,
    )


def _placed(job: PlannedJob) -> Placed:
    """The placement, by the best cost model for which enough is known."""
    if not trained_models(job.spec):
        return Placed({})
    return placements.place(job) or cpus.place(job) or place_evenly(job)


def _further_rounds(spec: RLHFJobSpec) -> list[str]:
    """A warning about dynamic sampling. How many prompts it replaces depends on their rewards, which no plan knows."""
    rounds = spec.ppo.dynamic_sampling
    if Stage.PPO not in spec.stages or not rounds:
        return []
    return [
        f"Predicted times and prices are of one round of generation; with spec.ppo.dynamicSampling {rounds} an "
        f"iteration may draw up to {rounds} more, each of the prompts that are replaced."
    ]


def _predicted(spec: RLHFJobSpec, placed: Placed, no_lag: str | None) -> Prediction | None:
    """The prediction with the job's lag, and with other lags beside it."""
    return None if placed.prediction is None else with_lags(placed.prediction, no_lag, spec.ppo.lag, placed.draw)


def _checkpointed(job: PlannedJob, placed: Placed) -> frozenset[tuple[Stage, str]]:
    """The stages and models with activation checkpointing: by the manifest's pin, or else by the search. If memory is
    not known, as on CPUs, they are those whose activations exceed spec.plan.activationMemory."""
    if job.spec.plan.recompute != "Auto":
        return frozenset((r.stage, r.model) for r in job.rules if job.spec.plan.recompute == "Always")
    if Stage.PPO not in job.spec.stages:
        return placed.recompute
    sizes = activation_bytes(job, placed)
    return placed.recompute | {(Stage.PPO, model) for model in beyond_limit(job.spec, sizes)}


def _gathered(job: PlannedJob, placed: Placed) -> frozenset[tuple[Stage, str]]:
    """The stages and models under ZeRO-3, by the manifest's pin or by the placement. They need data-parallel ranks that
    share the weights."""
    found = set()
    for rule in job.rules:
        layouts = placed.layouts_in(rule.stage)
        if layouts[rule.model].dp > job.pipelines(rule.stage, layouts, rule.model):
            found.add((rule.stage, rule.model))
    return frozenset(found if job.spec.plan.zero3 == "Always" else found & placed.by_layer)


def _activations(job: PlannedJob, placed: Placed) -> dict[str, list[int]]:
    """The bytes of a micro-batch's activations by model and stage, if PPO trains on pipelines."""
    if Stage.PPO not in job.spec.stages:
        return {}
    sizes = activation_bytes(job, placed)
    check_limit(job.spec, sizes)
    if sizes and job.spec.plan.chunks > 1:
        sizes = activation_bytes(job, placed, job.spec.plan.chunks)
    return sizes if _pipelined(job.spec, placed.layouts_in(Stage.PPO)) else {}


def _batching(job: PlannedJob, rule: BatchRule, placed: Placed) -> Batching:
    rows, tokens = rule.batch // placed.layouts_in(rule.stage)[rule.model].dp, rule.tokens
    count = rows // rule.micro
    if tokens is not None:
        longest = longest_sample(job.spec, rule.stage)
        if job.spec.ppo.micro_batch_tokens == "Auto" and rule.stage is Stage.PPO and placed.chosen is not None:
            tokens = placed.chosen.candidate.actor_training[0].micro_batch * longest
        count = min(rows, math.ceil(rows * longest / tokens))
    return Batching(
        stage=rule.stage,
        model=rule.model,
        mini_batch_size=rule.batch,
        micro_batch_size=rule.micro,
        micro_batch_tokens=tokens,
        micro_batches=count,
        recompute=(rule.stage, rule.model) in placed.recompute,
        zero3=(rule.stage, rule.model) in placed.by_layer,
        chunks=1 if rule.stage is Stage.PPO else chunks_alone(job, placed, rule),
    )


def _groups(spec: RLHFJobSpec, role: Role) -> list[Group]:
    return [group for group in spec.groups if role in group.roles]


def _trainers(spec: RLHFJobSpec) -> list[TrainerRank]:
    owners = [g.name for g in _groups(spec, Role.TRAINER) for _ in range(trainer_ranks(g))]
    return [TrainerRank(name=trainer_name(rank), rank=rank, group=owner) for rank, owner in enumerate(owners)]


def _rollouts(spec: RLHFJobSpec, placed: Placed, chunks: int) -> list[Rollout]:
    """The servers with the models that their scorers hold. Their groups' prediction adds the stages of servers and of
    scorers' models, and the memory. A pool of several trainer groups has their names, joined by "+"."""
    places = [(group.name, index) for group in _groups(spec, Role.ROLLOUT) for index in range(pod_count(group))]
    if not places:
        raise PlanError("spec.groups has no group with the rollout role; PPO needs one to generate")
    held = scorer_models(spec, len(places), placed.interleaved)
    tasks = [] if placed.prediction is None else placed.prediction.tasks
    stages = {(group, task.task): task.pp for task in tasks for group in task.group.split("+")}
    memory = {} if placed.chosen is None else server_memory(placed.chosen, chunks)
    return [
        Rollout(
            name=rollout_name(group, index),
            group=group,
            scores=scores,
            pp=stages.get((group, "generation"), 1),
            split={model: count for model in scores if (count := stages.get((group, model), 1)) > 1},
            memory=memory.get(group),
        )
        for (group, index), scores in zip(places, held, strict=True)
    ]


def _tasks(spec: RLHFJobSpec) -> list[TaskPlacement]:
    trainers = [g.name for g in _groups(spec, Role.TRAINER)]
    rollouts = [g.name for g in _groups(spec, Role.ROLLOUT)]
    ppo = Stage.PPO in spec.stages
    runs: list[tuple[Task, list[str], bool]] = [
        ("sft", trainers, Stage.SFT in spec.stages),
        ("reward_training", trainers, Stage.REWARD in spec.stages),
        ("dpo", trainers, Stage.DPO in spec.stages),
        ("generation", rollouts, ppo),
        ("reference", rollouts, ppo and spec.ppo.reads_reference),
        ("reward", rollouts, ppo and not spec.models.reward.calls),
        ("critic", rollouts, ppo and has_critic(spec)),
        ("critic_training", trainers, ppo and has_critic(spec)),
        ("actor_training", trainers, ppo),
    ]
    return [TaskPlacement(task=task, groups=groups) for task, groups, here in runs if here]


def _pipelined(spec: RLHFJobSpec, parallelism: Mapping[str, Parallelism]) -> bool:
    """Whether PPO trains on pipelines, so that there is a choice of schedules."""
    trained = [parallelism[model].pp for model in ("actor", "critic") if model in parallelism]
    return Stage.PPO in spec.stages and max(trained, default=1) > 1


def _schedule(
    spec: RLHFJobSpec, parallelism: Mapping[str, Parallelism]
) -> Literal["Auto", "Fused", "TimeSharing", "VShaped", "Dedicated", "Serial"]:
    """The plan's choice of schedules. Ranks can be divided between the models without pipelines too. Raises Infeasible
    if they are pinned to be divided and cannot be."""
    pin = spec.plan.intra_stage_fusion
    if pin == "Dedicated" and Stage.PPO in spec.stages and "critic" in parallelism:
        if divisions(parallelism, spec.ppo.mini_batch_size // spec.ppo.micro_batch_size):
            return pin
        raise Infeasible(
            f"spec.plan.intraStageFusion is Dedicated, but the {world_size(parallelism['actor'])} trainer ranks cannot "
            "be divided between actor and critic; give the trainer groups at least 2 ranks, or make "
            "spec.ppo.miniBatchSize a multiple of spec.ppo.microBatchSize times more ranks"
        )
    if spec.ppo.micro_batch_tokens is not None:
        return "Serial"
    if not _pipelined(spec, parallelism):
        return "Serial"
    if "critic" not in parallelism:
        return "Auto" if pin in FOR_TWO else pin
    return pin if pin != "Dedicated" else "Serial"


def _useless_pins(spec: RLHFJobSpec, placed: Placed) -> list[str]:
    """A sentence for each pin that has no effect."""
    pin, layouts = spec.plan.intra_stage_fusion, placed.layouts
    why = ""
    if "critic" not in layouts and pin in FOR_TWO:
        why = "no critic is trained"
    elif pin in ("Fused", "TimeSharing", "VShaped") and not _pipelined(spec, layouts):
        why = "neither actor nor critic has pipeline stages" if "critic" in layouts else "there are no pipeline stages"
    found = [f"spec.plan.intraStageFusion is {pin}, which has no effect: {why}"] if why else []
    if spec.plan.zero3 == "Always" and layouts and not placed.by_layer:
        found.append("spec.plan.zero3 is Always, which has no effect: no trained model has data-parallel ranks")
    return found
