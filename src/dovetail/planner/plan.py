"""A job's plan: all trainer ranks form one world. Where the models and GPUs are known, the search of a placement lays
it out; else it is as data-parallel as the batch sizes allow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from dovetail.manifest.checks.batching import BatchRule, batch_rules, pinned_layouts
from dovetail.manifest.critic import has_critic
from dovetail.manifest.sizes import pod_count, trained_models, trainer_ranks, trainer_world, world_size
from dovetail.manifest.types import Group, Parallelism, RLHFJobSpec, Role, Stage
from dovetail.planner.hardware import GPU
from dovetail.planner.placement.activations import LimitError, activation_bytes, beyond_limit, check_limit
from dovetail.planner.placement.configs import ConfigError, shapes
from dovetail.planner.placement.division import divisions
from dovetail.planner.placement.groups import Infeasible, Placed, place
from dovetail.planner.placement.machine import Local, place_locally
from dovetail.planner.placement.manifest import pin_errors, product_errors
from dovetail.planner.placement.pods import pod_memory, too_small
from dovetail.planner.placement.scorers import scorer_models, server_memory
from dovetail.planner.shape import ModelShape
from dovetail.protocol.plan import Batching, Plan, Rollout, TaskPlacement, TrainerRank
from dovetail.protocol.prediction import PodMemory, Prediction
from dovetail.protocol.profile import Profile


class PlanError(ValueError):
    """No plan fits the manifest; the message is one sentence naming the field."""


def make_plan(
    spec: RLHFJobSpec,
    layers: Mapping[str, int] | None = None,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    measured: Mapping[str, GPU] | None = None,
    profile: Profile | None = None,
) -> Plan:
    """The plan of a manifest that `dovetail.manifest.checks.validation.check` accepts. Deterministic.

    `configs`: the models' config.json, by the model that names the source (models from scratch need none); `measured`:
    hardware figures that go before the data sheets'. Where these tell all models and GPUs, the fastest layout that
    fits is taken (`dovetail.planner.placement`); on CPUs the fastest by `profile`, if it has measured whole iterations
    of these models. Else Auto parallelism takes the most data-parallel ranks that every batch of the model can be
    shared by, and pipeline stages for the rest; `layers[model]` bounds these. Raises PlanError."""
    world = trainer_world(spec)
    models = trained_models(spec)
    if models and world == 0:
        raise PlanError("spec.groups has no group with the trainer role; add `trainer` to one group's roles")
    if errors := product_errors(spec, measured) + pin_errors(spec):
        raise PlanError(errors[0])
    placed = _placed(spec, configs or {}, measured, profile) if models else None
    if placed is not None:
        parallelism = {model: placed.layouts[model] for model in models}
    else:
        parallelism = _layouts(spec, models, world, layers or {}, shapes(spec, configs or {})) if models else {}
    apart = placed.apart if isinstance(placed, Placed) else {}
    trained = {**parallelism, **apart}  # in PPO
    again = _recomputed(spec, configs or {}, trained, placed)
    if isinstance(placed, Placed) and again - placed.recompute:
        # What was predicted keeps more than spec.plan.activationMemory allows.
        always = spec.plan.model_copy(update={"recompute": "Always"})
        return make_plan(spec.model_copy(update={"plan": always}), layers, configs, measured, profile)
    rollouts = _rollouts(_interleaved(spec) if placed and placed.interleaved else spec)
    rollouts = _staged(rollouts, placed.prediction if placed else None) if Stage.PPO in spec.stages else []
    if Stage.PPO in spec.stages and not rollouts:
        raise PlanError("spec.groups has no group with the rollout role; PPO needs one to generate")
    schedule = "Dedicated" if apart else _schedule(spec, parallelism)
    again_ppo = {model for stage, model in again if stage is Stage.PPO}
    memory = _memory(spec, configs or {}, parallelism, schedule, again_ppo)
    return Plan(
        world_size=world,
        parallelism=parallelism,
        batching=[
            _batching(rule, (trained if rule.stage is Stage.PPO else parallelism)[rule.model], again)
            for rule in batch_rules(spec)
        ],
        tasks=_tasks(spec),
        trainers=_trainers(spec),
        rollouts=rollouts,
        schedule=schedule,
        apart=apart,
        activation_bytes=_activations(spec, configs or {}, trained, again_ppo),
        warnings=[*_warnings(spec, parallelism, chosen=placed is not None), *too_small(memory)],
        prediction=placed.prediction if placed is not None else None,
        memory=memory,
    )


def _placed(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    measured: Mapping[str, GPU] | None,
    profile: Profile | None,
) -> Placed | Local | None:
    try:
        return place(spec, configs, measured) or place_locally(spec, configs, profile)
    except (Infeasible, ConfigError) as error:
        raise PlanError(str(error)) from error


def _recomputed(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    parallelism: Mapping[str, Parallelism],
    placed: Placed | Local | None,
) -> frozenset[tuple[Stage, str]]:
    """Stages and models that make their activations again: as pinned; else where the search did, or where memory is
    not known, as on CPUs, for what spec.plan.activationMemory does not allow."""
    if spec.plan.recompute != "Auto":
        return frozenset((r.stage, r.model) for r in batch_rules(spec) if spec.plan.recompute == "Always")
    found = placed.recompute if isinstance(placed, Placed) else frozenset()
    if Stage.PPO not in spec.stages:
        return found
    try:
        sizes = activation_bytes(spec, configs, parallelism, {m for stage, m in found if stage is Stage.PPO})
    except ConfigError as error:
        raise PlanError(str(error)) from error
    return found | {(Stage.PPO, model) for model in beyond_limit(spec, sizes)}


def _memory(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    parallelism: Mapping[str, Parallelism],
    schedule: str,
    again: Collection[str],
) -> list[PodMemory]:
    try:
        return pod_memory(spec, configs, parallelism, schedule, again)
    except ConfigError as error:
        raise PlanError(str(error)) from error


def _activations(
    spec: RLHFJobSpec,
    configs: Mapping[str, Mapping[str, Any]],
    parallelism: Mapping[str, Parallelism],
    again: Collection[str],
) -> dict[str, list[int]]:
    if Stage.PPO not in spec.stages:
        return {}
    try:
        sizes = activation_bytes(spec, configs, parallelism, again)
        check_limit(spec, sizes)
    except (LimitError, ConfigError) as error:
        raise PlanError(str(error)) from error
    return sizes if _pipelined(spec, parallelism) else {}


def _interleaved(spec: RLHFJobSpec) -> RLHFJobSpec:
    return spec.model_copy(update={"plan": spec.plan.model_copy(update={"placement": "Interleaving"})})


def _layouts(
    spec: RLHFJobSpec,
    models: list[str],
    world: int,
    layers: Mapping[str, int],
    known: Mapping[str, ModelShape] | None,
) -> dict[str, Parallelism]:
    pinned = pinned_layouts(spec)
    rules = batch_rules(spec)
    result = {}
    for model in models:
        mine = [rule for rule in rules if rule.model == model]
        if pinned is None:
            result[model] = _auto(model, world, mine, layers.get(model))
        else:
            field, layout = pinned[model]
            _check_pinned(field, model, layout, world, mine, layers.get(model))
            if known is not None and (problem := known[model].split_problem(layout.tp)):
                raise PlanError(f"{field}.tp is {layout.tp}, which {problem} of the {model}; use a tp that does")
            result[model] = layout
    return result


def _check_pinned(
    field: str, model: str, layout: Parallelism, world: int, rules: list[BatchRule], layers: int | None
) -> None:
    if world_size(layout) != world:
        raise PlanError(
            f"{field}: pp {layout.pp} x tp {layout.tp} x dp {layout.dp} is {world_size(layout)} ranks, but the trainer "
            f"groups have {world}; make the product {world}"
        )
    if layers is not None and layout.pp > layers:
        raise PlanError(f"{field}.pp is {layout.pp}, but the {model} has only {layers} layers; lower it")
    for rule in rules:
        if problem := rule.problem(layout.dp):
            raise PlanError(problem)


def _auto(model: str, world: int, rules: list[BatchRule], layers: int | None) -> Parallelism:
    """pp: the smallest divisor of the world whose dp shares every batch evenly."""
    for pp in range(1, world + 1):
        if world % pp or (layers is not None and pp > layers):
            continue
        if all(rule.problem(world // pp) is None for rule in rules):
            return Parallelism(pp=pp, dp=world // pp)
    first = next((p for rule in rules if (p := rule.problem(world))), None)
    raise PlanError(first or f"the {model} cannot be laid out on {world} trainer ranks; change the groups' replicas")


def _batching(rule: BatchRule, layout: Parallelism, again: Collection[tuple[Stage, str]]) -> Batching:
    return Batching(
        stage=rule.stage,
        model=rule.model,
        mini_batch_size=rule.batch,
        micro_batch_size=rule.micro,
        micro_batches=rule.batch // (layout.dp * rule.micro),
        recompute=(rule.stage, rule.model) in again,
    )


def _groups(spec: RLHFJobSpec, role: Role) -> list[Group]:
    return [group for group in spec.groups if role in group.roles]


def _trainers(spec: RLHFJobSpec) -> list[TrainerRank]:
    owners = [g.name for g in _groups(spec, Role.TRAINER) for _ in range(trainer_ranks(g))]
    return [TrainerRank(name=f"trainer-{rank}", rank=rank, group=owner) for rank, owner in enumerate(owners)]


def _rollouts(spec: RLHFJobSpec) -> list[Rollout]:
    places = [(group.name, index) for group in _groups(spec, Role.ROLLOUT) for index in range(pod_count(group))]
    return [
        Rollout(name=f"{group}-{index}", group=group, scores=scores)
        for (group, index), scores in zip(places, scorer_models(spec, len(places)), strict=True)
    ]


def _staged(rollouts: list[Rollout], prediction: Prediction | None) -> list[Rollout]:
    """With what was predicted for their groups: stages of the servers and of what their scorers split, and memory. A
    pool of several trainer groups is named after all."""
    if prediction is None:
        return rollouts
    stages = {(group, task.task): task.pp for task in prediction.tasks for group in task.group.split("+")}
    return [
        r.model_copy(
            update={
                "pp": stages.get((r.group, "generation"), 1),
                "split": {model: count for model in r.scores if (count := stages.get((r.group, model), 1)) > 1},
                "memory": server_memory(prediction, r.group),
            }
        )
        for r in rollouts
    ]


def _tasks(spec: RLHFJobSpec) -> list[TaskPlacement]:
    trainers = [g.name for g in _groups(spec, Role.TRAINER)]
    rollouts = [g.name for g in _groups(spec, Role.ROLLOUT)]
    tasks = []
    if Stage.SFT in spec.stages:
        tasks.append(TaskPlacement(task="sft", groups=trainers))
    if Stage.REWARD in spec.stages:
        tasks.append(TaskPlacement(task="reward_training", groups=trainers))
    if Stage.PPO in spec.stages:
        tasks += [TaskPlacement(task="generation", groups=rollouts), TaskPlacement(task="reference", groups=rollouts)]
        if not spec.models.reward.calls:
            tasks.append(TaskPlacement(task="reward", groups=rollouts))
        if has_critic(spec):
            tasks.append(TaskPlacement(task="critic", groups=rollouts))
            tasks.append(TaskPlacement(task="critic_training", groups=trainers))
        tasks.append(TaskPlacement(task="actor_training", groups=trainers))
    return tasks


def _pipelined(spec: RLHFJobSpec, parallelism: Mapping[str, Parallelism]) -> bool:
    """Whether actor and critic train together on pipelines, so that their schedule is a matter of choice."""
    both = [parallelism.get(model) for model in ("actor", "critic")]
    return Stage.PPO in spec.stages and None not in both and max(layout.pp for layout in both if layout is not None) > 1


def _schedule(
    spec: RLHFJobSpec, parallelism: Mapping[str, Parallelism]
) -> Literal["Auto", "Fused", "TimeSharing", "Dedicated", "Serial"]:
    """Ranks can be divided between the models without pipelines too. Raises PlanError where they cannot be."""
    pin = spec.plan.intra_stage_fusion
    if pin == "Dedicated" and Stage.PPO in spec.stages and "critic" in parallelism:
        if divisions(parallelism, spec.ppo.mini_batch_size // spec.ppo.micro_batch_size):
            return pin
        raise PlanError(
            f"spec.plan.intraStageFusion is Dedicated, but the {world_size(parallelism['actor'])} trainer ranks cannot "
            "be divided between actor and critic; give the trainer groups at least 2 ranks, or make "
            "spec.ppo.miniBatchSize a multiple of spec.ppo.microBatchSize times more ranks"
        )
    return pin if pin != "Dedicated" and _pipelined(spec, parallelism) else "Serial"


def _warnings(spec: RLHFJobSpec, parallelism: Mapping[str, Parallelism], chosen: bool) -> list[str]:
    """Unless `chosen` by time and memory, Auto prefers data parallelism: a batch size forced pipeline stages."""
    found = []
    if spec.plan.parallelism == "Auto" and not chosen:
        found = [
            f"the {model} is split into {layout.pp} pipeline stages because its batches cannot be shared evenly by "
            f"more than {layout.dp} data-parallel rank{'s' if layout.dp > 1 else ''}"
            for model, layout in parallelism.items()
            if layout.pp > 1
        ]
    pin = spec.plan.intra_stage_fusion
    useless = pin in ("Fused", "TimeSharing") and not _pipelined(spec, parallelism)
    if useless or (pin == "Dedicated" and "critic" not in parallelism):
        why = "no critic is trained" if "critic" not in parallelism else "neither actor nor critic has pipeline stages"
        found.append(f"spec.plan.intraStageFusion is {pin}, which has no effect: {why}")
    return found
