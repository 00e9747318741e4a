"""Lists the layouts that a manifest allows: those that share every batch evenly, the pinned ones, and divisions of the
trainer ranks between actor and critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from dovetail.manifest.checks.batching import pinned_layouts
from dovetail.manifest.critic import has_critic
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.candidate import Task
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.placement.search.limits import every_layout, tensor_degrees
from dovetail.protocol.plan import Layout

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


def divisions(layouts: Mapping[str, Parallelism], micro_batches: int) -> list[dict[str, Layout]]:
    """The divisions of the trainer ranks. The first ranks are for the actor alone, the others for the critic.

    A model keeps its data-parallel size if it can, and has fewer pipeline stages instead. Then its micro-batches, and
    with them its gradients, are the same bits as on all ranks. Only the divisions that change the fewest data-parallel
    sizes are returned.

    `layouts`: the layouts on all ranks. `micro_batches`: those of a mini-batch, which data-parallel ranks share evenly.
    A model never has more pipeline stages than in `layouts`. The list is empty if the ranks cannot be divided."""
    world, tp = world_size(layouts["actor"]), layouts["actor"].tp
    found: list[tuple[int, dict[str, Layout]]] = []
    for ranks in range(tp, world, tp):
        actor = _part(layouts["actor"], ranks // tp, micro_batches)
        critic = _part(layouts["critic"], (world - ranks) // tp, micro_batches)
        if actor is None or critic is None:
            continue
        changed = (actor.dp != layouts["actor"].dp) + (critic.dp != layouts["critic"].dp)
        found.append((changed, {"actor": actor, "critic": critic.model_copy(update={"first": ranks})}))
    if not found:
        return []
    found.sort(key=lambda each: each[0])
    _, best = next(groupby(found, key=lambda each: each[0]))
    return [each for _, each in best]


def same_batches(layouts: Mapping[str, Parallelism], division: Mapping[str, Layout]) -> bool:
    """Whether every data-parallel rank has the same micro-batches as in `layouts`."""
    return all(division[name].dp == layouts[name].dp for name in ("actor", "critic"))


def _part(whole: Parallelism, ranks: int, micro_batches: int) -> Layout | None:
    """The layout of a model on `ranks` tensor-parallel groups of its own. It keeps the dp of `whole` if it can;
    otherwise it has as few stages as possible."""
    found = [each for each in every_layout(ranks, (1,), whole.pp) if micro_batches % each.dp == 0]
    best = min(found, key=lambda each: each.dp != whole.dp, default=None)
    return None if best is None else Layout(pp=best.pp, dp=best.dp, tp=whole.tp)
