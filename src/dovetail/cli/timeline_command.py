"""Makes plan.html, which shows a predicted iteration, GPU by GPU. It is one file and loads nothing."""

from __future__ import annotations

from typing import Any

from dovetail.cli.common.plan_tables import (
    alternative_row,
    gpu_range,
    memory_row,
    micro_batch,
    placement_name,
    task_name,
)
from dovetail.cli.simulated_iteration import Simulated, simulate
from dovetail.coordinator.reporting.page.iteration_timeline import BARS
from dovetail.coordinator.reporting.page.page_documents import plan_page
from dovetail.planner.planned_job import Chosen
from dovetail.protocol.prediction import Prediction

# With more GPUs than this, one GPU of each kind is shown. GPUs with the same tasks look the same.
EVERY_GPU = 64


def played(chosen: Chosen) -> Simulated:
    """The simulated iteration. Its samples have the lengths of the workload, without random draws."""
    work = chosen.costs.work
    prompts, responses = work.prompt.quantiles(work.batch), work.response.quantiles(work.batch)
    # Long and short samples are mixed in the same order every time.
    mixed = [responses[i] for i in sorted(range(work.batch), key=lambda i: i * 0.6180339887 % 1)]
    return simulate(chosen.candidate, chosen.costs, prompts, mixed)


def timeline_page(name: str, chosen: Chosen) -> bytes:
    """The page of a job called `name`: the run page with the view of a plan."""
    prediction, simulated = chosen.prediction, played(chosen)
    shown = _shown(prediction, chosen.costs.inventory.gpus)
    bars = [bar for bar in simulated.bars if shown is None or (bar.pool, bar.gpu) in shown]
    lanes: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for bar in sorted(sorted(bars, key=lambda bar: bar.start - bar.end)[:BARS], key=lambda bar: bar.start):
        lanes.setdefault((bar.pool, bar.gpu), []).append((bar.name, bar.start, bar.end, bar.lane))
    plan = {
        "unit": "s",
        "title": "Timeline by GPU" if shown is None else "Timeline, one GPU of each kind",
        "facts": [
            f"{placement_name(prediction.placement, prediction.note)}, schedule {prediction.schedule}",
            f"{prediction.iteration_seconds:.3g} s an iteration, {prediction.samples_per_second:.3g} samples/s "
            f"({simulated.seconds:.3g} s played event by event)",
            f"hardware figures: {prediction.hardware}",
        ],
        "phases": list(prediction.phases.items()),
        "lanes": [{"label": f"{pool} {gpu}", "bars": lanes[pool, gpu]} for pool, gpu in sorted(lanes)],
        "tables": _tables(prediction),
    }
    return plan_page(name, plan)


def _shown(prediction: Prediction, gpus: int) -> set[tuple[str, int]] | None:
    """The GPUs to show: one of each range with the same tasks, and the first of each pipeline stage. None: all GPUs."""
    if gpus <= EVERY_GPU:
        return None
    kept = {(m.group, m.first) for m in prediction.memory}
    for task in prediction.tasks:
        kept |= {(task.group, task.first + stage * task.tp * task.dp) for stage in range(task.pp)}
    return kept


def _tables(prediction: Prediction) -> list[dict[str, Any]]:
    tasks = [
        (
            task_name(t),
            t.group,
            gpu_range(t),
            f"{t.pp}, {t.tp}, {t.dp}",
            micro_batch(t),
            f"{t.seconds:.3g}",
            ", ".join(t.details),
        )
        for t in prediction.tasks
    ]
    columns = ("task", "group", "GPUs", "pp, tp, dp", "micro-batch", "seconds", "memory")
    memory = ("group", "GPUs", "used", "of", "by part")
    tables = [
        {"title": "Tasks", "columns": columns, "rows": tasks},
        {"title": "Memory of a GPU, GiB", "columns": memory, "rows": list(map(memory_row, prediction.memory))},
    ]
    if others := [alternative_row(prediction, other) for other in prediction.alternatives]:
        tables.append({"title": "Decided against", "columns": ("placement", "seconds", "why"), "rows": others})
    return tables
