"""Lists the layouts that a manifest allows: those that share every batch evenly, the pinned ones, and divisions of the
trainer ranks between actor and critic."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.manifest.checks.batching import pinned_layouts
from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.candidate import Task
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
