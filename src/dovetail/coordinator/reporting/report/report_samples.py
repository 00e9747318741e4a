"""The report's section about the model's responses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from dovetail.coordinator.reporting.sample_files import (
    BEFORE_SFT,
    Row,
    best_and_worst,
    evaluation_files,
    files,
    read_rows,
    shortened,
)
from dovetail.coordinator.reporting.sample_texts import facts_of

# The maximum number of evaluation prompts in the report.
PROMPTS = 4


@dataclass(frozen=True)
class SampleTexts:
    """The texts that the report shows. `iterations`: the samples of the first and the last iteration that are kept.
    `evaluations`: the answers to the prompts for evaluation at each moment of the run, in the order of the prompts."""

    iterations: dict[int, list[Row]] = field(default_factory=dict)
    evaluations: dict[str, list[Row]] = field(default_factory=dict)


def read_samples(run_dir: Path, method: str = "PPO") -> SampleTexts:
    """Read the texts that the run kept. `method`: the usual name of the stage ppo. A file that is missing or damaged
    counts as empty."""

    def rows(path: Path) -> list[Row]:
        with contextlib.suppress(OSError, ValueError):
            return read_rows(path)
        return []

    found, evaluated = files(run_dir), evaluation_files(run_dir)
    began = [BEFORE_SFT] if BEFORE_SFT in evaluated else []
    moments = began + _ends(evaluated.keys() - {BEFORE_SFT})
    return SampleTexts(
        {iteration: rows(found[iteration]) for iteration in _ends(found)},
        {_moment(version, method, bool(began)): rows(evaluated[version]) for version in moments},
    )


def _ends(found: Iterable[int]) -> list[int]:
    numbers = sorted(found)
    return sorted({numbers[0], numbers[-1]}) if numbers else []


def _moment(version: int, method: str, sft: bool) -> str:
    """The name of a moment. `sft`: whether the model before SFT answered too."""
    if version == BEFORE_SFT:
        return "before SFT"
    if version == 0:
        return f"after SFT, before {method}" if sft else f"before {method}"
    return f"after iteration {version} of {method}"


def samples_section(texts: SampleTexts) -> str:
    """The section as HTML, or '' if the run kept no text. Pure."""
    parts = [_held_out(texts.evaluations), _extremes(texts.iterations)]
    body = "".join(part for part in parts if part)
    return f"<h2>What the model says</h2>{body}" if body else ""


def _held_out(moments: Mapping[str, Sequence[Row]]) -> str:
    """A line for each prompt that was answered at every moment."""
    answers = [{row.get("prompt"): row for row in reversed(rows)} for rows in moments.values()]
    prompts = list(dict.fromkeys(r.get("prompt") for r in next(iter(moments.values()), [])))
    lines = [
        _line(_text(prompt), *(_answer(found[prompt]) for found in answers))
        for prompt in prompts
        if all(prompt in found for found in answers)
    ][:PROMPTS]
    return _table(("Prompt for evaluation", *(f"Answer {moment}" for moment in moments)), lines)


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
    return f'<td class="text">{escape(shortened(str(text).strip()))}{note}</td>'


def _line(*cells: str) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    if not lines:
        return ""
    cells = "".join(f'<th style="text-align:left">{escape(cell)}</th>' for cell in head)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table><br>"
