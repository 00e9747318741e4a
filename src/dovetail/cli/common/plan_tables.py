"""Shows a plan and its prediction as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from rich.console import Group
from rich.table import Table

from dovetail.coordinator.reporting.summary_rows import duration
from dovetail.manifest.checks.pod_templates import memory_limit
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, Stage
from dovetail.protocol.plan import Plan
from dovetail.protocol.prediction import (
    GIB,
    Alternative,
    PodMemory,
    PredictedLag,
    PredictedMemory,
    PredictedTask,
    Prediction,
)
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
    degrees = {"pp": "pipeline", "dp": "data", "tp": "tensor"}
    rarer = {"cp": "context (of data)", "ep": "experts (of data)"}
    degrees |= {d: heading for d, heading in rarer.items() if any(getattr(at, d) > 1 for _, at in _layouts(plan))}
    for heading in degrees.values():
        layouts.add_column(heading, justify="right")
    for name, layout in _layouts(plan):
        layouts.add_row(name, *(str(getattr(layout, degree)) for degree in degrees))

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


_WORDS = {
    "actor_training": "actor training",
    "critic_training": "critic training",
    "critic": "critic inference",
}


def prediction_tables(prediction: Prediction, title: str = "Predicted PPO iteration") -> Group:
    """The tables of a prediction: the GPUs of each task with its times, the memory by part, the lags, and the
    placements that were not chosen."""
    parts: list[Table | str] = [_tasks(prediction, title), "", *_facts(prediction)]
    if prediction.memory:
        parts += ["", _memory(prediction)]
    if prediction.lags:
        parts += ["", _lags(prediction)]
        parts.append(f"The planner would take lag {prediction.best_lag}: {prediction.best_lag_reason}.")
    if prediction.alternatives:
        parts += ["", _alternatives(prediction)]
    return Group(*parts)


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...] = (), last: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    if last is not None:
        table.add_column(last, overflow="fold")
    return table


def placement_name(placement: str, note: str) -> str:
    """A placement with its note, for example "Separation (reference and reward on halves)"."""
    return f"{placement} ({note})" if note else placement


def _tasks(prediction: Prediction, title: str) -> Table:
    # Without GPUs there is a table of the pods' memory instead.
    places = "GPUs" if prediction.memory else "processes"
    table = _table(title, ("task", "group", places, "pp,tp,dp"), ("micro-batch", "seconds"), "memory")
    for task in prediction.tasks:
        layout, seconds = f"{task.pp},{task.tp},{task.dp}", f"{task.seconds:.3g}"
        where, details = (task.group, gpu_range(task), layout), ", ".join(task.details)
        table.add_row(task_name(task), *where, micro_batch(task), seconds, details)
    return table


def task_name(task: PredictedTask) -> str:
    """The task's name for users."""
    return _WORDS.get(task.task, task.task)


def micro_batch(task: PredictedTask) -> str:
    """The number of samples in a forward pass. Empty for generation, because its server has no such number."""
    return "" if task.task == "generation" else str(task.micro_batch)


def gpu_range(place: PredictedTask | PredictedMemory) -> str:
    """The numbers of the GPUs in their group, for example 0-7."""
    return _range(place.first, place.gpus)


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _facts(prediction: Prediction) -> Iterator[str]:
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in prediction.phases.items() if seconds)
    yield f"Placement: {placement_name(prediction.placement, prediction.note)}"
    yield f"Schedule of actor and critic: {prediction.schedule}"
    if prediction.memory:
        threshold = "none" if prediction.migration is None else f"at {prediction.migration:.0%} of the samples left"
        yield f"Migration of generation's tail: {threshold}"
    speed = f"{_rate(prediction.samples_per_second)} samples/s"
    lag = f" with lag {prediction.lag}" if prediction.lag else ""
    yield f"Iteration{lag}: {prediction.iteration_seconds:.3g} s ({phases}); {speed}"
    if prediction.samples_per_dollar is not None:
        lost = f", {prediction.lost_share:.1%} of it for GPUs that come and go" if prediction.lost_share else ""
        yield f"Price of 1,000 samples: {_rate(1000 / prediction.samples_per_dollar)}{lost}"
    if prediction.lag:
        yield f"One after the other, its phases would take {prediction.synchronous_seconds:.3g} s"
    plural = "s"[: prediction.examined != 1]
    yield f"Hardware figures: {prediction.hardware}; {prediction.examined} iteration{plural} estimated"


def _rate(value: float) -> str:
    """A rate with three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _memory(prediction: Prediction) -> Table:
    table = _table("Memory of a GPU, GiB", ("group", "GPUs"), ("used", "of"), "by part")
    for each in prediction.memory:
        table.add_row(*memory_row(each))
    return table


def memory_row(each: PredictedMemory) -> tuple[str, str, str, str, str]:
    """The group, its GPUs, GiB used, GiB available, and the parts."""
    used = sum(each.parts.values())
    return each.group, gpu_range(each), f"{used / GIB:.1f}", f"{each.capacity / GIB:.1f}", _parts(each.parts)


def _parts(sizes: Mapping[str, float]) -> str:
    """The parts in GiB, the largest first. Parts below 0.5% of the sum are left out."""
    least = 0.005 * sum(sizes.values())
    largest = sorted(((n, s) for n, s in sizes.items() if s >= least), key=lambda part: -part[1])
    return ", ".join(f"{name.replace('_', ' ')} {size / GIB:.3g}" for name, size in largest)


def pod_memory_table(pods: Sequence[PodMemory], templates: Mapping[str, Mapping[str, Any]]) -> Table:
    """The memory of pods on CPUs. The column "of" has the limit in the group's podTemplate."""
    table = _table("Memory of a pod in PPO, GiB", ("group", "pods"), ("used", "of"), "by part")
    for each in pods:
        limit = memory_limit(templates[each.group])
        of = "" if limit is None else f"{limit.size / GIB:.1f}"
        table.add_row(each.group, _range(each.first, each.pods), f"{each.used / GIB:.1f}", of, _parts(each.parts))
    return table


def _lags(prediction: Prediction) -> Table:
    table = _table("With a lag (spec.ppo.lag)", (), ("lag", "seconds", "trainers idle", "rollouts idle"), "")
    for row in prediction.lags:
        table.add_row(*lag_row(row))
    return table


def lag_row(row: PredictedLag) -> tuple[str, str, str, str, str]:
    """The lag, the seconds of an iteration, the idle shares of trainers and rollouts, and why the job cannot have this
    lag."""

    def told(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    idle = told(row.trainer_idle, ".0%"), told(row.rollout_idle, ".0%")
    return str(row.lag), told(row.iteration_seconds, ".3g"), *idle, row.problem or ""


def _alternatives(prediction: Prediction) -> Table:
    table = _table("Decided against", ("placement",), ("seconds",), "why")
    for other in prediction.alternatives:
        table.add_row(*alternative_row(prediction, other))
    return table


def alternative_row(prediction: Prediction, other: Alternative) -> tuple[str, str, str]:
    """The placement, its seconds, and why it was not chosen."""
    seconds = "" if other.seconds is None else f"{other.seconds:.3g}"
    return placement_name(other.placement, other.note), seconds, other.problem or _gap(prediction, other)


def _gap(prediction: Prediction, other: Alternative) -> str:
    """How much slower the alternative is. It may also be faster, but by less than the error of the time model."""
    if other.seconds is None:
        return ""
    # The times of alternatives are without a lag, so they are compared with the time without one.
    if other.seconds < prediction.synchronous_seconds:
        return "gains too little to rely on"
    return f"{other.seconds / prediction.synchronous_seconds - 1:+.1%}"
