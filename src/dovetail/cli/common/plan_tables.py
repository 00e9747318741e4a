"""Shows a plan as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from rich.console import Group
from rich.table import Table

from dovetail.coordinator.reporting.summary_rows import duration
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, Stage
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.process_names import COORDINATOR, scorer_name

# If there are more processes of one kind in a row than this, they share a row of the table.
TOGETHER = 2
T = TypeVar("T")


def plan_tables(plan: Plan) -> Group:
    """The tables of a plan: processes, layouts, batches, stages and tasks."""
    processes = Table(title="Processes", title_justify="left", show_edge=False)
    for heading in ("process", "group", "runs"):
        processes.add_column(heading)
    processes.add_row(COORDINATOR, "", "data, samples, iterations")
    for trainers in _runs(plan.trainers, lambda each: each.group):
        ranks = "rank" if len(trainers) == 1 else "ranks"
        numbers = _through([str(each.rank) for each in trainers])
        names = _through([each.name for each in trainers])
        processes.add_row(names, trainers[0].group, f"trainer {ranks} {numbers} of {plan.world_size}")
    for rollouts in _runs(plan.rollouts, lambda each: (each.group, each.scores, each.split)):
        processes.add_row(_through([each.name for each in rollouts]), rollouts[0].group, "vLLM server")
        scored = (_on_gpus(model, rollouts[0].split.get(model, 1)) for model in rollouts[0].scores)
        names = _through([scorer_name(each.name) for each in rollouts])
        processes.add_row(names, rollouts[0].group, f"{', '.join(scored)} inference")

    schedule = "chosen as the job runs" if plan.schedule == "Auto" else plan.schedule
    title = f"Parallelism (schedule: {schedule})"
    layouts = Table(title=title, title_justify="left", show_edge=False)
    layouts.add_column("model")
    for heading in ("pipeline", "data", "tensor"):
        layouts.add_column(heading, justify="right")
    for name, layout in _layouts(plan):
        layouts.add_row(name, str(layout.pp), str(layout.dp), str(layout.tp))

    batches = Table(
        title="Batches (sequences; pairs for the reward model and DPO)", title_justify="left", show_edge=False
    )
    batches.add_column("stage")
    batches.add_column("model")
    for heading in ("per step", "micro-batch", "micro-batches a rank"):
        batches.add_column(heading, justify="right")
    recomputing = any(row.recompute for row in plan.batching)
    if recomputing:
        batches.add_column("activations")
    sharding = any(row.zero3 for row in plan.batching)
    if sharding:
        batches.add_column("weights")
    for row in plan.batching:
        micro, count = str(row.micro_batch_size), str(row.micro_batches)
        if row.micro_batch_tokens is not None:
            micro, count = f"{row.micro_batch_tokens:,} tokens", f"at most about {count}"
        kept = ["recomputed" if row.recompute else "kept"] if recomputing else []
        kept += ["gathered by layer" if row.zero3 else "gathered once"] if sharding else []
        batches.add_row(row.stage.value, row.model, str(row.mini_batch_size), micro, count, *kept)

    tasks = Table(title="Tasks", title_justify="left", show_edge=False)
    tasks.add_column("task")
    tasks.add_column("groups")
    for task in plan.tasks:
        tasks.add_row(task.task, ", ".join(task.groups))

    tables = [processes]
    tables += [layouts] if plan.parallelism else []
    tables += [batches] if plan.batching else []
    tables += [_stages(plan)] if plan.stages else []
    lag = [f"Lag (spec.ppo.lag is Auto): {plan.lag}, because {plan.lag_reason}.", ""] if plan.lag_reason else []
    return Group(*(part for table in [*tables, tasks] for part in (table, "")), *lag)


def _stages(plan: Plan) -> Table:
    """The predicted times of stages without iterations, if all sequences have the maximum length."""
    table = Table(title="Predicted stages, if all sequences have data.maxTokens", title_justify="left", show_edge=False)
    table.add_column("stage")
    table.add_column("seconds a step", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("together", justify="right", min_width=20)
    for row in plan.stages:
        known = ("by epochs", "") if row.steps is None else (f"{row.steps:,}", duration(row.steps * row.step_seconds))
        table.add_row(row.stage.value, f"{row.step_seconds:.3g}", *known)
    return table


def _layouts(plan: Plan) -> Iterator[tuple[str, Parallelism]]:
    """The layouts of the job's stages, by model. A model with ranks of its own is shown with these ranks."""
    for model, layout in plan.parallelism.items():
        if model not in plan.dedicated:
            yield model, layout
        elif any(row.model == model and row.stage is not Stage.PPO for row in plan.batching):
            yield f"{model}, before PPO", layout
    for model, own in plan.dedicated.items():
        last = own.first + world_size(own) - 1
        yield f"{model} in PPO, on {f'rank {last}' if own.first == last else f'ranks {own.first} to {last}'}", own


def _on_gpus(model: str, count: int) -> str:
    return model if count == 1 else f"{model} (on {count} GPUs)"


def _runs(processes: Iterable[T], kind: Callable[[T], Any]) -> Iterator[Sequence[T]]:
    """Yields the processes of each row. Neighbours of one kind share a row if there are more than TOGETHER of them."""
    for _, equal in groupby(processes, key=kind):
        found = list(equal)
        yield from [found] if len(found) > TOGETHER else [[each] for each in found]


def _through(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
