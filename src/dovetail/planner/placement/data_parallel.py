"""Lays out a job whose GPUs or models are not known: with as many data-parallel ranks as its batch sizes allow, or as
pinned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.manifest.checks.batching import BatchRule, batch_rules, pinned_layouts
from dovetail.manifest.sizes import trained_models, trainer_world, world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.placement.configs import shapes
from dovetail.planner.placement.layouts import allowed_layouts
from dovetail.planner.placement.placed import Infeasible, Placed


def place(spec: RLHFJobSpec, configs: Mapping[str, Mapping[str, Any]], layers: Mapping[str, int]) -> Placed:
    """The layouts of the trained models. A model has pipeline stages only if its batches cannot be shared by all ranks.
    `layers[model]` is the most stages of a model.

    Raises Infeasible or ConfigError."""
    pinned, rules, world = pinned_layouts(spec), batch_rules(spec), trainer_world(spec)
    known = shapes(spec, configs)
    layouts = {}
    for model in trained_models(spec):
        mine = [rule for rule in rules if rule.model == model]
        if pinned is None:
            allowed = allowed_layouts(spec, model, world, layers.get(model))
            if not allowed:
                why = next((p for rule in mine if (p := rule.problem(world))), None)
                raise Infeasible(
                    why or f"the {model} cannot be laid out on {world} trainer ranks; change the groups' replicas"
                )
            layouts[model] = allowed[0]
            continue
        field, layout = pinned[model]
        _check_pinned(field, layout, model, world, mine, layers.get(model))
        _check_chunks(spec, field, layout, model, layers.get(model))
        if known is not None and (problem := known[model].split_problem(layout.tp, model)):
            raise Infeasible(f"{field}.tp is {layout.tp}, {problem}")
        layouts[model] = layout
    return Placed(layouts, warnings=() if pinned else tuple(_warnings(layouts)))


def _check_pinned(
    field: str, layout: Parallelism, model: str, world: int, rules: list[BatchRule], layers: int | None
) -> None:
    if world_size(layout) != world:
        raise Infeasible(
            f"{field}: pp {layout.pp} x tp {layout.tp} x dp {layout.dp} is {world_size(layout)} ranks, but the trainer "
            f"groups have {world}; make the product {world}"
        )
    if layers is not None and layout.pp > layers:
        raise Infeasible(f"{field}.pp is {layout.pp}, but the {model} has only {layers} layers; lower it")
    for rule in rules:
        if problem := rule.problem(layout.dp):
            raise Infeasible(problem)


def _check_chunks(spec: RLHFJobSpec, field: str, layout: Parallelism, model: str, layers: int | None) -> None:
    if layers is not None and layout.pp > 1 and layers < layout.pp * spec.plan.chunks:
        raise Infeasible(
            f"{field}.pp is {layout.pp}, and spec.plan.intraStageFusion VShaped puts two stages of a model on each "
            f"rank, but the {model} has only {layers} layers; lower pp, or set spec.plan.intraStageFusion to Auto"
        )


def _warnings(layouts: Mapping[str, Parallelism]) -> list[str]:
    return [
        f"the {model} is split into {layout.pp} pipeline stages because its batches cannot be shared evenly by "
        f"more than {layout.dp} data-parallel rank{'s' if layout.dp > 1 else ''}"
        for model, layout in layouts.items()
        if layout.pp > 1
    ]
