"""`dovetail audit`: says whether each prompt was trained exactly as the manifest says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from dovetail.protocol.errors import RunError
from dovetail.protocol.process.extras import require

if TYPE_CHECKING:
    from dovetail.tools.rollout_dumps import Dumped
    from dovetail.tools.run_audit import RunAudit

MOST_LINES = 20
_COLUMNS = {
    "prompt_tokens": "Samples by length of the prompt, tokens",
    "response_tokens": "Samples by length of the response, tokens",
    "reward": "Samples by reward",
}
_OUTCOMES = {"equal_rewards": "dropped: equal rewards", "discarded": "drawn again", "alone": "not compared"}


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--against",
    "dump",
    type=click.Path(path_type=Path, exists=True),
    metavar="DUMP",
    help="Say instead which of these prompts a rollout dump of TRL, verl or OpenRLHF lacks, and how long they are. "
    "RUN_DIR may then also be the dump of an undisturbed run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one for each prompt.")
def audit(run_dir: Path, dump: Path | None, as_json: bool) -> None:
    """Say whether each prompt was trained exactly as the manifest says, over kills, resumes and lags.

    The record of the run's store is compared with the manifest and its data, and with the batches that are still kept.
    It can be called while the run goes on. The exit code is 1 if something differs.

    \b
      dovetail audit runs/quickstart
    """
    require("dovetail audit", ["coordinator"])
    if dump is not None:
        _against(run_dir, dump, as_json)
        return
    from dovetail.tools.run_audit import audit_run

    found = audit_run(run_dir)
    if as_json:
        for row in _json_rows(found):
            click.echo(json.dumps(row, ensure_ascii=False))
    else:
        _show(found)
    if found.found.problems:
        raise RunError(found.found.sentence())


def _json_rows(audited: RunAudit) -> Iterator[dict[str, Any]]:
    for text, prompt in audited.found.prompts.items():
        drawn = sum(prompt.outcomes.values())
        samples = {"drawn": drawn, **{str(name): count for name, count in sorted(prompt.outcomes.items())}}
        yield {
            "prompt": audited.texts.get(text),
            "tokens": prompt.tokens,
            "samples": samples,
            "iterations": prompt.iterations,
        }


def _show(audited: RunAudit) -> None:
    from dovetail.coordinator.reporting.audit import by_range, by_times

    console, found = Console(), audited.found
    for problem in found.problems[:MOST_LINES]:
        click.echo(f"  {problem}")
    if len(found.problems) > MOST_LINES:
        click.echo(f"  ... and {len(found.problems) - MOST_LINES} more")
    if found.parts:
        console.print(_times_table(by_times(found, audited.known)))
    for column, title in _COLUMNS.items():
        table = _table(
            title, "", "drawn", *(_OUTCOMES.get(name, name.removeprefix("episode_")) for name in found.samples)
        )
        for name, counts in by_range(found, column):
            table.add_row(name, f"{sum(counts.values()):,}", *(f"{counts[each]:,}" for each in found.samples))
        console.print(table)
    if audited.disturbed:
        told = ", ".join(f"{name}: {count}" for name, count in audited.disturbed.items())
        click.echo(f"\nIn this run: {told}.")
    if audited.batches:
        click.echo(f"The stored batches of {len(audited.batches)} iterations were compared with the record.")
    if audited.unread:
        click.echo(f"Only numbers were compared, because the data cannot be read again: {audited.unread}")
    if not found.problems:
        click.echo(found.sentence())


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False, min_width=len(title))
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _times_table(times: Sequence[tuple[int, int]]) -> Table:
    table = _table("Prompts by times trained", "times trained", "prompts")
    for count, prompts in times:
        table.add_row("not reached" if count == 0 else str(count), f"{prompts:,}")
    return table


def _against(path: Path, dump: Path, as_json: bool) -> None:
    from dovetail.tools.rollout_dumps import compare, read_dump
    from dovetail.tools.run_audit import undisturbed

    found = compare(undisturbed(path), read_dump(dump))
    if as_json:
        for fate, prompts in (("lost", found.lost), ("repeated", found.repeated)):
            for prompt in prompts:
                click.echo(json.dumps({"prompt": prompt.text, "fate": fate, "characters": prompt.length}))
    else:
        for prompt in sorted(found.lost, key=lambda each: -each.length)[:MOST_LINES]:
            click.echo(f"  {prompt.length:8,.0f} characters  {_line(prompt)}")
    if found.lost or found.repeated:
        raise RunError(found.sentence())
    click.echo(found.sentence())


def _line(prompt: Dumped) -> str:
    text = " ".join(prompt.text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"
