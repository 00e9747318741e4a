"""Lists the layouts that a manifest allows: those that share every batch evenly, the pinned ones, and divisions of the
trainer ranks between actor and critic."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.manifest.checks.batching import pinned_layouts
from dovetail.manifest.critic import has_critic
from dovetail.manifest.sizes import trained_models, trainer_world, world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.candidate import Task
from dovetail.planner.placement.placed import Infeasible, Placed
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.placement.search.limits import every_layout, tensor_degrees
from dovetail.protocol.plan import divisions

TRAINING_TASKS: dict[str, Task] = {"actor": "actor_training", "critic": "critic_training"}


def pinned_shares(spec: RLHFJobSpec) -> dict[Task, tuple[Parallelism, ...]]:
    """The layouts that spec.plan.parallelism allows for actor and critic training. Empty if it allows all."""
    pins = pinned_layouts(spec)
    if pins is None:
        return {}
    whole = {model: pins[model][1] for model in TRAINING_TASKS}
    if spec.plan.intra_stage_fusion != "Dedicated" or not has_critic(spec):
        return {task: (whole[model],) for model, task in TRAINING_TASKS.items()}
    parts = divisions(whole, spec.ppo.mini_batch_size // spec.ppo.micro_batch_size)
    return {
        task: tuple(Parallelism(pp=part[model].pp, tp=part[model].tp, dp=part[model].dp) for part in parts)
        for model, task in TRAINING_TASKS.items()
    }


def trainable_layouts(job: PlannedJob, model: str) -> list[Parallelism]:
    """The `allowed_layouts` of a model on all GPUs of the trainers."""
    return allowed_layouts(job, model, job.trainers.gpus, job.shape(model).layers, degrees_of(job, model))


def degrees_of(job: PlannedJob, model: str) -> list[int]:
    """The tensor-parallel degrees of a trained model on the trainers' nodes."""
    return tensor_degrees(job.shape(model), job.trainers.per_node, getattr(job.spec.models, model).lora)


def most_stages(job: PlannedJob, layers: int) -> int:
    """The most pipeline ranks of a model with `layers` layers."""
    return max(1, layers // job.spec.plan.chunks)


def allowed_layouts(
    job: PlannedJob, model: str, ranks: int, layers: int | None, degrees: Sequence[int] = (1,)
) -> list[Parallelism]:
    """The layouts over `ranks` ranks that share every batch of the model in every stage evenly. If a layout is pinned,
    only that one is allowed. `layers`: the model's layers, or None if they are not known. `degrees`: the allowed tp."""
    rules = [rule for rule in job.rules if rule.model == model]
    pins = pinned_layouts(job.spec)
    return [
        layout
        for layout in every_layout(ranks, degrees, ranks if layers is None else most_stages(job, layers))
        if all(rule.problem(layout.dp) is None for rule in rules) and (pins is None or pins[model][1] == layout)
    ]


def place_evenly(job: PlannedJob) -> Placed:
    """The layouts of the trained models of a job whose GPUs or models are not known: with as many data-parallel ranks
    as its batch sizes allow, or as pinned. A model has pipeline stages only if not all ranks can share its batches.

    Raises Infeasible or ConfigError."""
    pins = pinned_layouts(job.spec)
    if pins is not None:
        return Placed({model: _checked(job, model, *pins[model]) for model in trained_models(job.spec)})
    layouts = {model: _widest(job, model) for model in trained_models(job.spec)}
    warnings = tuple(
        f"the {model} is split into {layout.pp} pipeline stages because its batches cannot be shared evenly by "
        f"more than {layout.dp} data-parallel rank{'s' if layout.dp > 1 else ''}"
        for model, layout in layouts.items()
        if layout.pp > 1
    )
    return Placed(layouts, warnings=warnings)


def _widest(job: PlannedJob, model: str) -> Parallelism:
    """The layout with the most data-parallel ranks."""
    world = trainer_world(job.spec)
    if allowed := allowed_layouts(job, model, world, job.layers.get(model)):
        return allowed[0]
    why = next((p for rule in job.rules if rule.model == model and (p := rule.problem(world))), None)
    raise Infeasible(why or f"the {model} cannot be laid out on {world} trainer ranks; change the groups' replicas")


def _checked(job: PlannedJob, model: str, field: str, layout: Parallelism) -> Parallelism:
    """A pinned layout, which `field` names."""
    spec, world, layers = job.spec, trainer_world(job.spec), job.layers.get(model)
    if world_size(layout) != world:
        raise Infeasible(
            f"{field}: pp {layout.pp} x tp {layout.tp} x dp {layout.dp} is {world_size(layout)} ranks, but the trainer "
            f"groups have {world}; make the product {world}"
        )
    if layers is not None and layout.pp > layers:
        raise Infeasible(f"{field}.pp is {layout.pp}, but the {model} has only {layers} layers; lower it")
    if why := next((p for rule in job.rules if rule.model == model and (p := rule.problem(layout.dp))), None):
        raise Infeasible(why)
    if layers is not None and layout.pp > 1 and layers < layout.pp * spec.plan.chunks:
        raise Infeasible(
            f"{field}.pp is {layout.pp}, and spec.plan.intraStageFusion VShaped puts two stages of a model on each "
            f"rank, but the {model} has only {layers} layers; lower pp, or set spec.plan.intraStageFusion to Auto"
        )
    if job.shapes is not None and (why := job.shape(model).split_problem(layout.tp, model)):
        raise Infeasible(f"{field}.tp is {layout.tp}, {why}")
    return layout
