"""A plan as tables."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from dovetail.api.plan import Plan


def plan_tables(plan: Plan) -> Group:
    """Processes, layouts, batches and tasks of a plan."""
    processes = Table(title="Processes", title_justify="left", show_edge=False)
    for heading in ("process", "group", "runs"):
        processes.add_column(heading)
    processes.add_row("coordinator", "", "data, samples, iterations")
    for trainer in plan.trainers:
        processes.add_row(trainer.name, trainer.group, f"trainer rank {trainer.rank} of {plan.world_size}")
    for rollout in plan.rollouts:
        processes.add_row(rollout.name, rollout.group, "vLLM server")
        scored = (_on_gpus(model, rollout.split.get(model, 1)) for model in rollout.scores)
        processes.add_row(f"{rollout.name}-scorer", rollout.group, f"{', '.join(scored)} inference")

    title = f"Parallelism (schedule: {plan.schedule})"
    layouts = Table(title=title, title_justify="left", show_edge=False)
    layouts.add_column("model")
    for heading in ("pipeline", "data", "tensor"):
        layouts.add_column(heading, justify="right")
    for model, layout in plan.parallelism.items():
        layouts.add_row(model, str(layout.pp), str(layout.dp), str(layout.tp))

    batches = Table(title="Batches (sequences; pairs for the reward model)", title_justify="left", show_edge=False)
    batches.add_column("stage")
    batches.add_column("model")
    for heading in ("per step", "micro-batch", "micro-batches a rank"):
        batches.add_column(heading, justify="right")
    again = any(row.recompute for row in plan.batching)
    if again:
        batches.add_column("activations")
    for row in plan.batching:
        sizes = (row.mini_batch_size, row.micro_batch_size, row.micro_batches)
        kept = ["made again" if row.recompute else "kept"] if again else []
        batches.add_row(row.stage.value, row.model, *map(str, sizes), *kept)

    tasks = Table(title="Tasks", title_justify="left", show_edge=False)
    tasks.add_column("task")
    tasks.add_column("groups")
    for task in plan.tasks:
        tasks.add_row(task.task, ", ".join(task.groups))

    tables = [processes]
    tables += [layouts] if plan.parallelism else []
    tables += [batches] if plan.batching else []
    return Group(*(part for table in [*tables, tasks] for part in (table, "")))


def _on_gpus(model: str, count: int) -> str:
    return model if count == 1 else f"{model} (on {count} GPUs)"
