"""Shows a prediction of the planner as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group
from rich.table import Table

from dovetail.protocol.prediction import (
    Alternative,
    PodMemory,
    PredictedLag,
    PredictedMemory,
    PredictedTask,
    Prediction,
)

GIB = 2**30
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
        parts += ["", _lags(prediction), _lag_choice(prediction)]
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


def pod_memory_table(pods: Sequence[PodMemory]) -> Table:
    """The memory of pods on CPUs. The column "of" has the limit in the manifest."""
    table = _table("Memory of a pod in PPO, GiB", ("group", "pods"), ("used", "of"), "by part")
    for each in pods:
        limit = "" if each.limit is None else f"{each.limit / GIB:.1f}"
        table.add_row(each.group, _range(each.first, each.pods), f"{each.used / GIB:.1f}", limit, _parts(each.parts))
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


def _lag_choice(prediction: Prediction) -> str:
    return f"The planner would take lag {prediction.best_lag}: {prediction.best_lag_reason}."


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
