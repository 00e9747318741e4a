"""Lays out a job whose GPUs or models are not known: with as many data-parallel ranks as its batch sizes allow, or as
pinned."""

from __future__ import annotations

from dovetail.manifest.checks.batching import pinned_layouts
from dovetail.manifest.sizes import trained_models, trainer_world, world_size
from dovetail.manifest.types import Parallelism
from dovetail.planner.placement.layouts import allowed_layouts
from dovetail.planner.placement.placed import Infeasible, Placed
from dovetail.planner.placement.planned_job import PlannedJob


def place(job: PlannedJob) -> Placed:
    """The layouts of the trained models. A model has pipeline stages only if its batches cannot be shared by all ranks.

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
