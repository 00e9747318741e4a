"""`dovetail schedule`: compares the families of pipeline schedules for training two models."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.cli.common.plan_inputs import read_profile
from dovetail.coordinator.reporting.page.page_documents import plan_page
from dovetail.coordinator.schedules.training_schedule import profiled_problem
from dovetail.pipelines import (
    CHUNKED,
    COMPILED,
    DEDICATED,
    FAMILIES,
    Choice,
    Pass,
    ProblemError,
    Schedule,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    choose,
    document,
    family_names,
    family_of,
    find,
    fused_problem,
    serial_memory,
    steps,
)
from dovetail.protocol.errors import UsageError
from dovetail.protocol.process.extras import DISTRIBUTION

_positive = click.FloatRange(0, min_open=True)
_count = click.IntRange(1)


@click.command()
@click.option("--stages", type=_count, nargs=2, required=True, help="Pipeline stages of actor and critic.")
@click.option("--micro-batches", type=_count, required=True, help="Micro-batches of an actor pipeline in a mini-batch.")
@click.option(
    "--forward", type=_positive, nargs=2, help="Times of a stage of actor and critic at the larger stage count."
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Use the times that dovetail profile measured. Times are then in seconds, and sizes in bytes.",
)
@click.option(
    "--micro-batch-size", type=_count, default=1, show_default=True, help="Sequences of a micro-batch, with --profile."
)
@click.option(
    "--mini-batches",
    type=_count,
    default=1,
    show_default=True,
    help="The number of mini-batches. An optimizer step is between each two.",
)
@click.option(
    "--memory",
    type=_positive,
    help="Limit of a rank's activations. The unit is what the actor's micro-batch holds in a stage, or a byte with "
    "--profile.",
)
@click.option(
    "--family",
    type=click.Choice(["auto", *FAMILIES, *CHUNKED, DEDICATED.name]),
    default="auto",
    show_default=True,
    help="auto: the fastest that fits.",
)
@click.option(
    "--seconds",
    type=_positive,
    default=20.0,
    show_default=True,
    help="Seconds to search. With auto the families share them.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="Write the schedule as JSON, or a page with its timeline if the name ends in .html. May be repeated.",
)
def schedule(
    stages: tuple[int, int],
    micro_batches: int,
    forward: tuple[float, float] | None,
    profile_path: Path | None,
    micro_batch_size: int,
    mini_batches: int,
    memory: float | None,
    family: str,
    seconds: float,
    output: tuple[Path, ...],
) -> None:
    """Search pipeline schedules that train an actor and a critic together.

    You see each family's makespan, its speed-up over serial 1F1B and its peak of activation memory, and the timeline of
    the fastest family that fits. Times may be in any unit. If a model has half as many stages as the other, its stages
    take twice as long and hold twice as much. The critic's micro-batches follow from the actor's.

    \b
      dovetail schedule --stages 8 4 --micro-batches 16 --forward 5 2 -o schedule.html
    """
    console = Console()
    try:
        if profile_path is not None:
            problem = profiled_problem(
                read_profile(profile_path),
                stages,
                micro_batches,
                micro_batch_size,
                mini_batches=mini_batches,
                memory_limit=memory,
            )
        elif forward:
            problem = fused_problem(*stages, micro_batches, *forward, mini_batches=mini_batches, memory_limit=memory)
        else:
            raise UsageError("--forward is missing; give it, or measured times with --profile.")
        if not COMPILED:
            remedy = f"pip install '{DISTRIBUTION}[schedules]'"
            click.echo(
                f"Warning: numba is not installed; the search is slow and weak. Install it with: {remedy}", err=True
            )
        with console.status("searching") as status:

            def progress(what: str, makespan: float, peak: float) -> None:
                status.update(f"{what}: makespan {makespan:g}, peak activation {peak:g}")

            effort = SearchEffort(seconds, time.monotonic, os.cpu_count() or 1, progress=progress)
            if family == "auto":
                own = [DEDICATED.name] if problem.ranks > 1 else []
                choice = choose(problem, effort, [*family_names(problem, chunked=True), *own])
            else:
                best = find(problem, family_of(family), effort)
                others = _others(problem, [n for n in ("serial", "stitched", "zb-v") if n != family], effort)
                choice = Choice(best, {family: best, **others}, {})
    except ProblemError as error:
        raise UsageError(f"{error}.") from error
    check_steps(choice.best.instance.problem, steps(choice.best))
    _show(console, problem, choice)
    for path in output:
        written = (
            _page(problem, choice) if path.suffix == ".html" else json.dumps(document(choice.best)).encode() + b"\n"
        )
        try:
            path.write_bytes(written)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
        console.print(f"Written: {path}", highlight=False, markup=False, soft_wrap=True)


def _others(problem: ScheduleProblem, names: list[str], effort: SearchEffort) -> dict[str, Schedule]:
    try:
        return choose(problem, effort, names).schedules
    except ProblemError:  # none of these families fits, but the one that was asked for does
        return {}


_COLUMNS = ("family", "makespan", "bound", "speed-up", "loses", "peak", "of serial")


def _rows(problem: ScheduleProblem, choice: Choice) -> Iterator[tuple[str, ...]]:
    """A row of _COLUMNS for each family. The chosen one has a star."""
    baseline = find(replace(problem, memory_limit=None), FAMILIES["serial"], SearchEffort()).makespan
    unit = serial_memory(problem)
    for name, found in choice.schedules.items():
        chosen = found is choice.best
        yield (
            f"{name} *" if chosen else name,
            f"{found.makespan:g}",
            f"{found.bound:g}" if not family_of(name).fixed else "",
            f"{baseline / found.makespan:.3f}",
            "" if chosen else f"{100 * choice.loss(name):.1f} %",
            f"{found.peak:g}",
            f"{found.peak / unit:.2f}",
        )
    for name in choice.refused:
        yield (name, "does not fit", *[""] * 5)


def _page(problem: ScheduleProblem, choice: Choice) -> bytes:
    """A page with the timeline of the chosen schedule, rank by rank, and the table of families."""
    best = choice.best
    ranks: list[list[tuple[Any, ...]]] = [[] for _ in range(best.instance.ranks)]
    for p in best.passes():
        ranks[p.rank].append((f"{p.model} {p.kind}{p.micro_batch}", p.start, p.end, f"stage {p.stage}"))
    lanes = [{"label": f"rank {rank}", "bars": bars} for rank, bars in enumerate(ranks)]
    facts = [f"Makespan {best.makespan:g}, bound {best.bound:g}, peak activation {best.peak:g}"]
    families = {"title": "Families", "columns": _COLUMNS, "rows": list(_rows(problem, choice))}
    plan = {"title": "Timeline by rank", "unit": "units", "facts": facts, "phases": [], "lanes": lanes}
    return plan_page(best.family, {**plan, "tables": [families]})


def _show(console: Console, problem: ScheduleProblem, choice: Choice) -> None:
    table = Table(show_edge=False)
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for row in _rows(problem, choice):
        table.add_row(*row, style="bold" if row[0].endswith("*") else None)
    console.print(table)
    families = [family_of(name) for name in (*choice.schedules, *choice.refused)]
    known = [f"{family.name} is {family.published}" for family in families if family.published]
    if known:
        console.print()
        console.print(Text(f"Published as: {'; '.join(known)}.", style="dim"))
    names = [m.name for m in problem.models]
    best = choice.best
    kinds = "F forward, I input gradient, W weight gradient" if best.instance.split else "F forward, B backward"
    console.print()
    console.print(
        Text.assemble(
            f"{best.family}, {best.makespan:g} long: ",
            (names[0], "cyan"),
            " in capitals, ",
            (names[1], "yellow"),
            f" in small letters; {kinds}; a dot is idle",
        )
    )
    width = max(40, min(console.width - 10, 160))
    for rank, characters in enumerate(_text_rows(best, width)):
        line = Text(f"rank {rank:<3} ")
        for character, model in characters:
            shown = character.lower() if model == 1 else character
            line.append(shown, style=("cyan", "yellow")[model] if model is not None else "dim")
        console.print(line, no_wrap=True, overflow="crop")


def _text_rows(schedule: Schedule, width: int) -> list[list[tuple[str, int | None]]]:
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
