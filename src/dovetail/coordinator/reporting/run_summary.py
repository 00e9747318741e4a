"""Prints the table at the end of a run, from summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dovetail.coordinator.reporting.bill import sentences
from dovetail.coordinator.reporting.summary_rows import (
    PHASES,
    duration,
    fusion_rows,
    get,
    method,
    outcome,
    overlap_sentence,
    rows,
    stage_seconds,
)
from dovetail.protocol.errors import RunError


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read summary.json. Raises RunError if there is none, or if it is damaged."""
    path = run_dir / "summary.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: the run has not finished, or {run_dir} is no run directory") from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise RunError(f"{path} is not a JSON object")
    return document


def how_it_ended(summary: Mapping[str, Any]) -> list[str]:
    """Lines about a run that did not succeed. They tell its state, the reason, and what it finished."""
    state = str(summary.get("state") or "")
    if state in ("", "succeeded"):
        return []
    reason = summary.get("reason")
    lines = [f"{state}: {reason}" if reason else state]
    stage, done = get(summary, "progress.stage"), get(summary, "progress.done")
    if stage is not None:
        unit = f"{method(summary)} iteration" if stage == "ppo" else f"step of stage {stage},"
        lines.append(f"last finished: {unit} {done}")
    return lines


def health_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (what, first iteration, last one or count) of the iterations' health. Empty for a run without PPO."""
    iterations, unhealthy = get(summary, "health.iterations"), get(summary, "health.unhealthy")
    if not iterations:
        return []
    found = [("Unhealthy iterations", "", f"{unhealthy or 0} of {iterations}")]
    for reason, known in sorted((get(summary, "health.reasons") or {}).items(), key=lambda item: item[1]["first"]):
        first, last, count = known["first"], known["last"], known["count"]
        found.append((f"  {reason}", f"iteration {first}", f"iteration {last}" if last > first else ""))
        if count > 1:
            found[-1] = (*found[-1][:2], f"iteration {last}, {count} in all")
    return found


def health_sentences(summary: Mapping[str, Any]) -> list[str]:
    """The last sentence of each verdict, in the order of their first iterations."""
    reasons = sorted((get(summary, "health.reasons") or {}).items(), key=lambda item: item[1]["first"])
    return [f"{reason} (iteration {known['last']}): {known['message']}" for reason, known in reasons]


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The table printed when a run ends."""
    table = Table(title="Result", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("before / first", justify="right")
    table.add_column("after / last", justify="right")
    for row in rows(summary):
        table.add_row(*row)
    rate, wall = get(summary, "samples_per_second"), get(summary, "wall_seconds")
    table.add_section()
    if rate is not None:
        table.add_row("Samples per second", "", f"{rate:.2f}")
    if wall is not None:
        table.add_row("Wall time", "", duration(wall))
    for row in [*health_rows(summary), *fusion_rows(summary)]:
        table.add_row(*row)
    for name, seconds in stage_seconds(summary):
        table.add_row(f"  stage {name}", "", duration(seconds))
    phases = {k: v for k, v in (get(summary, "phases") or {}).items() if isinstance(v, int | float)}
    overlap = get(summary, "overlap.seconds")
    total = sum(phases.values()) if overlap is None else float(overlap)
    if total > 0:
        table.add_section()
        table.add_row(f"{method(summary)} iterations, all together", "", duration(total))
        for name in sorted(phases, key=lambda n: PHASES.index(n) if n in PHASES else len(PHASES)):
            table.add_row(f"  {name}", f"{phases[name] / total:.1%}", duration(phases[name]))
        if (other := get(summary, "overlap.synchronous_seconds")) is not None:
            table.add_row("  phases one after the other", f"{other / total:.1%}", duration(other))
    if get(summary, "seed") is not None:
        table.add_section()
        table.add_row("Seed", "", str(summary["seed"]))
    return table


def show(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the reason if the run did not succeed, then the table, then the verdicts on its health."""
    for line in how_it_ended(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(summary_table(summary))
    if said := outcome(summary):
        console.print(f"\n{said}", highlight=False, markup=False, soft_wrap=True)
    if audited := get(summary, "audit.sentence"):
        console.print(f"\n{audited}", highlight=False, markup=False, soft_wrap=True)
    if overlap := overlap_sentence(summary):
        console.print(f"\n{overlap}", highlight=False, soft_wrap=True)
    if sentences := health_sentences(summary):
        console.print()
    for line in sentences:
        console.print(f"Warning: {line}", highlight=False, markup=False, soft_wrap=True)


def show_bill(console: Console, bill: Mapping[str, Any]) -> None:
    """Print what the GPUs did and what that cost, as `Bill.document` returns it."""
    if not bill:
        return
    total = sum(seconds for _, seconds, _ in bill["parts"])
    table = Table(title="Bill", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for column in (f"{bill['unit']} seconds", "share", *(["price"] if bill["price"] is not None else [])):
        table.add_column(column, justify="right")
    for works, title in ((True, "work"), (False, "idle")):
        mine = [(name, seconds) for name, seconds, each in bill["parts"] if each == works]
        for name, seconds in [(title, sum(seconds for _, seconds in mine)), *((f"  {n}", s) for n, s in mine)]:
            price = [] if bill["price"] is None else [f"{bill['price'] * seconds / total:,.2f}"]
            table.add_row(name, f"{seconds:,.1f}", f"{seconds / total:.1%}", *price)
    console.print()
    console.print(table)
    for sentence in sentences(bill):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
