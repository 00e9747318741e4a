"""Draws timelines as SVG and as text."""

from __future__ import annotations

import math
from html import escape

from dovetail.pipelines.schedule import Pass, Schedule

# A model has one colour, light for forward and dark for backward. They differ in grey prints too, and for colour-blind
# readers.
_FILL = {
    (0, "F"): "#9ecae9",
    (0, "B"): "#2f6ea5",
    (0, "I"): "#2f6ea5",
    (0, "W"): "#6fa3cf",
    (1, "F"): "#fdd0a2",
    (1, "B"): "#d9741a",
    (1, "I"): "#d9741a",
    (1, "W"): "#f0a45c",
}
_DARK = {"B", "I"}


def svg(schedule: Schedule, title: str = "", width: int = 1100) -> str:
    """The timeline as a self-contained SVG document. Each rank has a row, and time runs to the right."""
    names = [m.name for m in schedule.instance.problem.models]
    left, top, row = 62, 34, 22
    ranks = schedule.instance.ranks
    scale = (width - left - 12) / schedule.makespan
    height = top + ranks * row + 48
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="13">{escape(title or _title(schedule))}</text>',
    ]
    for rank in range(ranks):
        y = top + rank * row
        out.append(f'<text x="{left - 6}" y="{y + 14}" text-anchor="end">rank {rank}</text>')
        out.append(
            f'<rect x="{left}" y="{y + 1}" width="{schedule.makespan * scale:.2f}" height="{row - 3}" fill="#f2f2f2"/>'
        )
    for p in schedule.passes():
        x, y, w = left + p.start * scale, top + p.rank * row + 1, (p.end - p.start) * scale
        index = names.index(p.model)
        hint = escape(f"{p.model} {p.kind} micro-batch {p.micro_batch}, stage {p.stage}: {p.start:g} to {p.end:g}")
        out.append(
            f'<g><title>{hint}</title><rect x="{x:.2f}" y="{y}" width="{max(w - 0.4, 0.2):.2f}" height="{row - 3}" '
            f'fill="{_FILL[index, p.kind]}"/>'
        )
        if w >= 6.2 * len(str(p.micro_batch)) + 2:
            ink = "white" if p.kind in _DARK else "black"
            out.append(
                f'<text x="{x + w / 2:.2f}" y="{y + 14}" text-anchor="middle" fill="{ink}">{p.micro_batch}</text>'
            )
        out.append("</g>")
    y = top + ranks * row + 14
    for tick in _ticks(schedule.makespan):
        out.append(f'<text x="{left + tick * scale:.2f}" y="{y}" text-anchor="middle">{tick:g}</text>')
    x = float(left)
    labels = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    kinds = "FIW" if schedule.instance.split else "FB"
    for index, name in enumerate(names):
        for kind in kinds:
            label = f"{name} {labels[kind]}"
            out.append(f'<rect x="{x:.0f}" y="{y + 12}" width="12" height="12" fill="{_FILL[index, kind]}"/>')
            out.append(f'<text x="{x + 17:.0f}" y="{y + 22}">{escape(label)}</text>')
            x += 34 + 6.2 * len(label)
    return "\n".join([*out, "</svg>", ""])


def _title(schedule: Schedule) -> str:
    return f"{schedule.family}: {schedule.makespan:g}, bound {schedule.bound:g}, peak activation {schedule.peak:g}"


def _ticks(end: float) -> list[float]:
    rough = end / 8
    power = 10 ** math.floor(math.log10(rough))
    size = next(power * f for f in (1, 2, 5, 10) if power * f >= rough)
    return [size * i for i in range(int(end / size) + 1)]


def text_rows(schedule: Schedule, width: int = 100) -> list[list[tuple[str, int | None]]]:
    """The timeline for a terminal. Each rank has a list of (character, model or None), one for each column.

    A column shows the pass that fills most of it, if the rank computes for at least half of it. Otherwise it shows a
    dot."""
    names = [m.name for m in schedule.instance.problem.models]
    rows: list[list[tuple[str, int | None]]] = []
    passes: list[list[Pass]] = [[] for _ in range(schedule.instance.ranks)]
    for p in schedule.passes():
        passes[p.rank].append(p)
    column = schedule.makespan / width
    for mine in passes:
        row: list[tuple[str, int | None]] = []
        for i in range(width):
            low, high = i * column, (i + 1) * column
            shown = {p: overlap for p in mine if (overlap := min(p.end, high) - max(p.start, low)) > 0}
            idle = sum(shown.values()) < column / 2
            best = None if idle else max(shown, key=lambda p: shown[p])
            row.append((".", None) if best is None else (best.kind, names.index(best.model)))
        rows.append(row)
    return rows
