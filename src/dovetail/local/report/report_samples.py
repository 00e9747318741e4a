"""The report's section on what the model says."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from dovetail.coordinator.store.sample_files import (
    Row,
    best_and_worst,
    files,
    held_out_file,
    read_rows,
    shortened,
)
from dovetail.local.sample_texts import facts_of

# Held-out prompts in the report.
PROMPTS = 4


@dataclass(frozen=True)
class SampleTexts:
    """`iterations`: the samples of the first and the last iteration that are kept. `before`, `after`: the answers to
    held-out prompts before and after PPO, each in the order of the prompts."""

    iterations: dict[int, list[Row]] = field(default_factory=dict)
    before: list[Row] = field(default_factory=list)
    after: list[Row] = field(default_factory=list)


def read_samples(run_dir: Path) -> SampleTexts:
    """What the run kept. A file that is missing or damaged counts as empty."""

    def rows(path: Path) -> list[Row]:
        with contextlib.suppress(OSError, ValueError):
            return read_rows(path)
        return []

    found = files(run_dir)
    ends = sorted({min(found), max(found)}) if found else []
    return SampleTexts(
        {iteration: rows(found[iteration]) for iteration in ends},
        rows(held_out_file(run_dir, "before_ppo")),
        rows(held_out_file(run_dir, "after_ppo")),
    )


def samples_section(texts: SampleTexts) -> str:
    """The section as HTML, or nothing if the run kept no text. Pure."""
    parts = [_held_out(texts.before, texts.after), _extremes(texts.iterations)]
    body = "".join(part for part in parts if part)
    return f"<h2>What the model says</h2>{body}" if body else ""


def _held_out(before: Sequence[Row], after: Sequence[Row]) -> str:
    later = {row.get("prompt"): row for row in after}
    lines = [
        _line(_text(row.get("prompt")), _answer(row), _answer(later[row["prompt"]]))
        for row in before
        if row.get("prompt") in later
    ][:PROMPTS]
    return _table(("Held-out prompt", "Answer before PPO", "Answer after PPO"), lines)


def _answer(row: Row) -> str:
    measures = [f"{name} {value:.3g}" for name, value in (row.get("measures") or {}).items()]
    return _text(row.get("response"), ", ".join(measures))


def _extremes(iterations: dict[int, list[Row]]) -> str:
    lines = [
        _line(_text(f"iteration {iteration}, {which}", facts_of(row)), _text(row.get("prompt")), _text(row["response"]))
        for iteration, rows in iterations.items()
        for which, row in best_and_worst(rows)
    ]
    return _table(("Highest and lowest reward", "Prompt", "Response"), lines)


def _text(text: Any, remark: str = "") -> str:
    note = f'<div class="sub">{escape(remark)}</div>' if remark else ""
    return f'<td class="text">{escape(shortened(str(text)))}{note}</td>'


def _line(*cells: str) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    if not lines:
        return ""
    cells = "".join(f'<th style="text-align:left">{escape(cell)}</th>' for cell in head)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table><br>"
