"""Makes plan.html, which shows a predicted iteration, GPU by GPU. It is one file without scripts and loads no other
files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from dovetail.cli.common.prediction_tables import (
    alternative_row,
    gpu_range,
    memory_row,
    micro_batch,
    placement_name,
    task_name,
)
from dovetail.coordinator.reporting.report import charts
from dovetail.coordinator.reporting.report.report import STYLE
from dovetail.planner.placement.placed import Chosen
from dovetail.planner.simulate.iteration import Simulated, simulate
from dovetail.protocol.prediction import Prediction

KINDS = (
    "generation",
    "reference",
    "reward",
    "critic",
    "actor F",
    "actor B",
    "critic F",
    "critic B",
    "optimizer",
    "weights",
)
# With more GPUs than this, one GPU of each kind is shown. GPUs with the same tasks look the same.
EVERY_GPU = 64


def played(chosen: Chosen) -> Simulated:
    """The simulated iteration. Its samples have the lengths of the workload, without random draws."""
    work = chosen.costs.work
    prompts, responses = work.prompt.quantiles(work.batch), work.response.quantiles(work.batch)
    # Long and short samples are mixed in the same order every time.
    order = sorted(range(work.batch), key=lambda i: i * 0.6180339887 % 1)
    return simulate(chosen.candidate, chosen.costs, prompts, responses[order])


def timeline_page(name: str, chosen: Chosen) -> str:
    """The HTML page of a job called `name`."""
    found, simulated = chosen.prediction, played(chosen)
    shown = _shown(found, chosen.costs.inventory.gpus)
    bars = [
        charts.ChartBar(f"{b.pool} {b.gpu}", b.name, b.start, b.end, b.lane)
        for b in simulated.bars
        if shown is None or (b.pool, b.gpu) in shown
    ]
    bars.sort(key=lambda bar: _order(bar.track))
    title = "Timeline by GPU" if shown is None else "Timeline, one GPU of each kind"
    facts = [
        f"{placement_name(found.placement, found.note)}, schedule {found.schedule}",
        f"{found.iteration_seconds:.3g} s an iteration, {found.samples_per_second:.3g} samples/s "
        f"({simulated.seconds:.3g} s played event by event)",
        f"hardware figures: {found.hardware}",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}: Dovetail plan</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(name)}</h1><p class="sub">{"<br>".join(map(escape, facts))}</p>'
        f"{charts.share_bar('Phases', list(found.phases.items()))}{charts.gantt(title, bars, KINDS)}"
        f"<h2>Tasks</h2>{_tasks(found)}<h2>Memory of a GPU, GiB</h2>{_memory(found)}"
        f"{_alternatives(found)}</main></body></html>\n"
    )


def _order(track: str) -> tuple[str, int]:
    pool, _, number = track.rpartition(" ")
    return pool, int(number)


def _shown(found: Prediction, gpus: int) -> set[tuple[str, int]] | None:
    """The GPUs to show: one of each range with the same tasks, and the first of each pipeline stage. None: all GPUs."""
    if gpus <= EVERY_GPU:
        return None
    kept = {(m.group, m.first) for m in found.memory}
    for task in found.tasks:
        kept |= {(task.group, task.first + stage * task.tp * task.dp) for stage in range(task.pp)}
    return kept


def _tasks(found: Prediction) -> str:
    rows = [
        (
            task_name(t),
            t.group,
            gpu_range(t),
            f"{t.pp}, {t.tp}, {t.dp}",
            micro_batch(t),
            f"{t.seconds:.3g}",
            *_joined(t.details),
        )
        for t in found.tasks
    ]
    return _table(("task", "group", "GPUs", "pp, tp, dp", "micro-batch", "seconds", "memory"), rows)


def _joined(words: Sequence[str]) -> tuple[str]:
    return (", ".join(words),)


def _memory(found: Prediction) -> str:
    rows = map(memory_row, found.memory)
    return _table(("group", "GPUs", "used", "of", "by part"), rows)


def _alternatives(found: Prediction) -> str:
    rows = [alternative_row(found, other) for other in found.alternatives]
    return f"<h2>Decided against</h2>{_table(('placement', 'seconds', 'why'), rows)}" if rows else ""


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
