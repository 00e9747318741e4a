"""Makes a job's plan. It is the planner's entry point. `placements` (GPUs) or `cpus` lays the job out, and this file
writes the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from dovetail.gpus.gpu_products import GPU, UnknownProduct, gpu
from dovetail.manifest.checks.batching import BatchRule, longest_sample, micro_batch_tokens
from dovetail.manifest.resolve import with_lag
from dovetail.manifest.sizes import has_critic, pod_count, trainer_ranks, world_size
from dovetail.manifest.training_types import AUTO_LAG
from dovetail.manifest.types import Dtype, Group, Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner import cpus, placements
from dovetail.planner.candidate import INFERENCE, Schedule, scorer_models
from dovetail.planner.cpus import pod_memory
from dovetail.planner.lags import chosen, excluded, with_lags
from dovetail.planner.memory import GIB, training_memory
from dovetail.planner.planned_job import (
    SEVERAL,
    Chosen,
    ConfigError,
    Infeasible,
    Placed,
    PlannedJob,
    allowed_layouts,
    costs_with,
    even_chunks,
    most_chunks,
)
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.plan import Batching, Plan, Rollout, Task, TaskPlacement, TrainerRank, divisions
from dovetail.protocol.process.process_names import rollout_name, trainer_name


class PlanError(ValueError):
    """No plan fits the manifest. The message is one sentence that names the field."""


FOR_TWO = ("Fused", "TimeSharing", "Dedicated")
"""The values of plan.intraStageFusion that only actor and critic together can have."""
# CPU time of the coordinator's event loop for a sample, and for each of its tokens: bench_coordinator, on one core.
SAMPLE_SECONDS, TOKEN_SECONDS = 0.4e-3, 1.5e-6
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
    job = PlannedJob(spec, configs or {}, layers or {}, measured, profile, zero3)
    if job.trained and job.ranks == 0:
        raise PlanError("spec.groups has no group with the trainer role; add `trainer` to one group's roles")
    if job.ranks > MOST_RANKS:
        more = "lower replicas or gpu.perPod of the trainer groups"
        raise PlanError(f"spec.groups has {job.ranks} trainer ranks, and at most {MOST_RANKS} can be planned; {more}")
    estimated = _estimated_products(spec, measured)
    _check_pin(spec)

    def planned(lag: int) -> Plan:
        decided = with_lag(spec, lag)
        found = _planned(replace(job, spec=decided), excluded(spec))
        return found.model_copy(update={"lag": decided.ppo.lag, "warnings": [*estimated, *found.warnings]})

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
    spec = job.spec
    placed = placements.place(job) or cpus.place(job) or place_evenly(job) if job.trained else Placed({})
    checkpointed = _checkpointed(job, placed)
    if placed.chosen is not None and checkpointed - placed.recompute:
        # The predicted layout keeps more activations than spec.plan.activationMemory allows.
        return _planned(job.pinned(recompute="Always"), no_lag)
    placed = replace(placed, recompute=checkpointed, by_layer=_gathered(job, placed))
    schedule = "Dedicated" if placed.dedicated else _schedule(spec, placed.layouts)
    if schedule == "Auto" and placed.chosen is not None and "critic" in placed.layouts:
        schedule = fitting(placed.chosen)
    chunks = most_chunks(job, placed, schedule)
    return Plan(
        world_size=job.ranks,
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
            *placed.warnings,
            *_useless_pins(spec, placed),
            *_further_rounds(spec),
            *_too_fast(placed),
        ],
        prediction=placed.prediction and with_lags(placed.prediction, no_lag, spec.ppo.lag, placed.draw),
        stages=list(placed.stages),
        memory=pod_memory(job, placed, schedule, chunks),
    )


def place_evenly(job: PlannedJob) -> Placed:
    """The layouts of the trained models of a job whose GPUs or models are not known: with as many data-parallel ranks
    as its batch sizes allow, or as pinned. A model has pipeline stages only if not all ranks can share its batches.

    Raises Infeasible or ConfigError."""
    if job.pins is not None:
        return Placed({model: _checked(job, model, *job.pins[model]) for model in job.trained})
    layouts = {}
    for model in job.trained:
        allowed = allowed_layouts(job, model, job.ranks, job.layers.get(model))
        if not allowed:
            why = next((p for rule in job.rules if rule.model == model and (p := rule.problem(job.ranks))), None)
            where = f"the {model} cannot be laid out on {job.ranks} trainer ranks; change the groups' replicas"
            raise Infeasible(why or where)
        layouts[model] = allowed[0]  # the one with the most data-parallel ranks
    warnings = tuple(
        f"the {model} is split into {layout.pp} pipeline stages because its batches cannot be shared evenly by "
        f"more than {layout.dp} data-parallel rank{'s' if layout.dp > 1 else ''}"
        for model, layout in layouts.items()
        if layout.pp > 1
    )
    return Placed(layouts, warnings=warnings)


def _checked(job: PlannedJob, model: str, field: str, layout: Parallelism) -> Parallelism:
    """A pinned layout, which `field` names."""
    spec, world, layers = job.spec, job.ranks, job.layers.get(model)
    if world_size(layout) != world:
        raise Infeasible(
            f"{field}: pp {layout.pp} x tp {layout.tp} x dp {layout.dp} is {world_size(layout)} ranks, but the trainer "
            f"groups have {world}; make the product {world}"
        )
    if layers is not None and layout.pp > layers:
        raise Infeasible(f"{field}.pp is {layout.pp}, but the {model} has only {layers} layers; lower it")
    if why := next((p for rule in job.rules if rule.model == model and (p := rule.problem(layout.batch_shares))), None):
        raise Infeasible(why)
    if layers is not None and layout.pp > 1 and layers < layout.pp * spec.plan.chunks:
        raise Infeasible(
            f"{field}.pp is {layout.pp}, and spec.plan.intraStageFusion VShaped puts two stages of a model on each "
            f"rank, but the {model} has only {layers} layers; lower pp, or set spec.plan.intraStageFusion to Auto"
        )
    if job.shapes is not None:
        if why := job.shape(model).split_problem(layout.tp, model):
            raise Infeasible(f"{field}.tp is {layout.tp}, {why}")
        if why := job.shape(model).share_problem(layout.cp, layout.tp):
            raise Infeasible(f"{field}.cp is {layout.cp}, {why}")
        if why := job.shape(model).deal_problem(layout.ep):
            raise Infeasible(f"{field}.ep is {layout.ep}, {why}")
    return layout


def _further_rounds(spec: RLHFJobSpec) -> list[str]:
    """A warning about dynamic sampling. How many prompts it replaces depends on their rewards, which no plan knows."""
    rounds = spec.ppo.dynamic_sampling
    if Stage.PPO not in spec.stages or not rounds:
        return []
    return [
        f"Predicted times and prices are of one round of generation; with spec.ppo.dynamicSampling {rounds} an "
        f"iteration may draw up to {rounds} more, each of the prompts that are replaced."
    ]


def _too_fast(placed: Placed) -> list[str]:
    """A warning about GPUs that generate faster than the coordinator's one process follows."""
    if placed.chosen is None:
        return []
    work = placed.chosen.costs.work
    made = max((t.seconds for t in placed.chosen.prediction.tasks if t.task == "generation"), default=0.0)
    tokens = work.batch * work.response.mean
    followed = work.batch * SAMPLE_SECONDS + tokens * TOKEN_SECONDS
    if not 0 < made < followed:
        return []
    return [
        f"The rollouts could make {tokens / made:,.0f} tokens a second, and the coordinator follows about "
        f"{tokens / followed:,.0f} of responses of {work.response.mean:.0f} tokens: generation will take about "
        f"{followed:.1f} s an iteration, not {made:.1f} s; fewer replicas of the rollout groups would do."
    ]


def _checkpointed(job: PlannedJob, placed: Placed) -> frozenset[tuple[Stage, str]]:
    """The stages and models with activation checkpointing: by the manifest's pin, or else by the search. If memory is
    not known, as on CPUs, they are those whose activations exceed spec.plan.activationMemory."""
    if job.spec.plan.recompute != "Auto":
        return frozenset((r.stage, r.model) for r in job.rules if job.spec.plan.recompute == "Always")
    if Stage.PPO not in job.spec.stages:
        return placed.recompute
    sizes, limit = activation_bytes(job, placed), job.spec.plan.activation_memory
    most = math.inf if limit is None else limit * GIB
    return placed.recompute | {(Stage.PPO, model) for model, each in sizes.items() if max(each) > most}


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


def _up(value: float) -> str:
    """The value with three digits, rounded up."""
    shown = f"{value:.3g}"
    return shown if float(shown) >= value else f"{value * 1.005:.3g}"


def fitting(chosen: Chosen) -> Literal["Auto", "TimeSharing", "Serial"]:
    """The schedules that fit if a placement on GPUs was chosen and the manifest leaves the schedule open. Those that
    run both models at once need the gradients and the gathered weights of both. So a placement may fit only if the
    models take turns, or only if no critic's stage runs against the actor's."""

    def fits(schedule: Schedule) -> bool:
        return chosen.costs.estimate(replace(chosen.candidate, schedule=schedule)).fits

    return "Auto" if fits("Fused") else "TimeSharing" if fits("TimeSharing") else "Serial"


def chunks_alone(job: PlannedJob, placed: Placed, rule: BatchRule) -> int:
    """The most stages of a model on a rank in a stage before PPO, or in DPO. It is what the manifest pins, or what the
    job permits. On GPUs it is 1 unless it is pinned: these stages are short, and memory is known with one stage."""
    layout, pin = placed.layouts_in(rule.stage)[rule.model], job.spec.plan.intra_stage_fusion
    if layout.pp == 1 or rule.tokens is not None or pin == "Serial":
        return 1
    if pin == "VShaped":
        layers = job.shape(rule.model).layers if job.shapes is not None else job.layers.get(rule.model)
        return job.spec.plan.chunks if layers is None or layers >= layout.pp * job.spec.plan.chunks else 1
    return 1 if job.trains_on_gpus else max(even_chunks(job, {rule.model: layout}, SEVERAL[:1]), default=1)


def _batching(job: PlannedJob, rule: BatchRule, placed: Placed) -> Batching:
    rows, tokens = rule.batch // placed.layouts_in(rule.stage)[rule.model].batch_shares, rule.tokens
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


def server_memory(chosen: Chosen, chunks: int) -> dict[str, float]:
    """The fraction of a GPU's memory for the servers of each group that leaves some to others. The others are trainers
    that keep their state there, and scorers that stay beside a server that is awake. It holds for every number of
    stages on a rank up to `chunks`, because the schedules choose that number."""
    candidate = chosen.candidate
    parts = chosen.costs.memory.server_memory(candidate)
    for count in (c for c in SEVERAL if c <= chunks):
        several = costs_with(chosen, count).memory.server_memory(replace(candidate, schedule="VShaped"))
        parts = {share: min(part, several[share]) for share, part in parts.items()}
    training = {share.pool for share in candidate.trained}
    scored = [share for task in INFERENCE for share in candidate.shares(task)]
    found: dict[str, float] = {}
    for share, part in parts.items():
        beside = not share.offload and any(share.overlaps(other) for other in scored)
        if share.pool in training or beside:
            found |= dict.fromkeys(share.pool.split("+"), math.floor(100 * part) / 100)
    return found


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


def _estimated_products(spec: RLHFJobSpec, measured: Mapping[str, GPU] | None) -> list[str]:
    """One sentence for each group whose GPU is in no table. Raises PlanError for a product that is not known."""
    found = []
    for index, group in enumerate(spec.groups):
        field = f"spec.groups[{index}].gpu.product"
        try:
            known = None if group.on_cpu else gpu(str(group.gpu.product), measured)
        except UnknownProduct as error:
            raise PlanError(f"{field}: {error}") from error
        if known is not None and known.estimated:
            found.append(
                f"{field} {known.product} is in no table of GPUs: its figures are {known.source}, with "
                f"{known.memory / 2**30:.0f} GiB. An administrator may give them in the chart's jobs.gpuProducts."
            )
    return found


def _check_pin(spec: RLHFJobSpec) -> None:
    """Raises PlanError if the groups' roles contradict the pinned placement."""
    pin = spec.plan.placement
    both = next((g.name for g in spec.groups if g.colocated), None)
    if pin == "Flattening" and both is None and _groups(spec, Role.ROLLOUT):
        raise PlanError(
            f"spec.plan.placement is {pin}, but no group both trains and generates; give one roles [trainer, rollout]"
        )
    if pin == "Separation" and both is not None:
        raise PlanError(
            f"spec.plan.placement is Separation, but group {both} both trains and generates; give it one role, or set "
            "the placement to Auto"
        )
