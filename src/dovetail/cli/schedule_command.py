"""`dovetail schedule`: compares the families of pipeline schedules for training two models."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.pipelines import (
    CHUNKED,
    COMPILED,
    DEDICATED,
    FAMILIES,
    Choice,
    ProblemError,
    Schedule,
    ScheduleProblem,
    SearchEffort,
    cached_find,
    check_steps,
    choose,
    document,
    family_names,
    family_of,
    find,
    fused_problem,
    interleaved_family,
    pareto,
    serial_memory,
    steps,
    svg,
    text_rows,
    zero_bubble_limit,
)
from dovetail.protocol.errors import UsageError
from dovetail.protocol.process.extras import DISTRIBUTION

_positive = click.FloatRange(0, min_open=True)
_count = click.IntRange(1)


@click.command()
@click.option("--actor-stages", type=_count, required=True, help="Pipeline stages of the actor.")
@click.option("--critic-stages", type=_count, required=True, help="Pipeline stages of the critic.")
@click.option("--micro-batches", type=_count, required=True, help="Micro-batches of an actor pipeline in a mini-batch.")
@click.option("--actor-forward", type=_positive, help="Time of a stage at the larger stage count.")
@click.option("--critic-forward", type=_positive, help="Time of a stage at the larger stage count.")
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
    "--actor-backward", type=_positive, help="Time of a stage's backward pass.  [default: twice the forward time]"
)
@click.option(
    "--critic-backward", type=_positive, help="Time of a stage's backward pass.  [default: twice the forward time]"
)
@click.option(
    "--actor-activation",
    type=_positive,
    default=1.0,
    show_default=True,
    help="Memory of a micro-batch in a stage at the larger stage count.",
)
@click.option("--critic-activation", type=_positive, help="[default: the actor's times the ratio of forward times]")
@click.option(
    "--communication", type=click.FloatRange(0), default=0.0, show_default=True, help="Latency between two stages."
)
@click.option(
    "--mini-batches",
    type=_count,
    default=1,
    show_default=True,
    help="The number of mini-batches. An optimizer step is between each two.",
)
@click.option("--memory", type=_positive, help="Limit of a rank's activations, in units of --actor-activation.")
@click.option(
    "--family",
    type=click.Choice(["auto", *FAMILIES, *CHUNKED, DEDICATED.name]),
    default="auto",
    show_default=True,
    help="auto: the fastest that fits.",
)
@click.option("--chunks", type=click.IntRange(2), help="Stages of each model on a rank, for --family interleaved.")
@click.option(
    "--seconds",
    type=_positive,
    default=20.0,
    show_default=True,
    help="Seconds to search. With auto the families share them.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--workers", type=_count, help="The number of threads.  [default: the number of cores]")
@click.option("--pareto", "show_front", is_flag=True, help="Show what less memory costs the best family, or --family.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the schedule as JSON.")
@click.option("--svg", "svg_path", type=click.Path(path_type=Path, dir_okay=False), help="Draw the timeline.")
@click.option("--no-cache", is_flag=True, help="Search again, even if an earlier call has found the answer.")
def schedule(
    family: str,
    chunks: int | None,
    seconds: float,
    seed: int,
    workers: int | None,
    output: Path | None,
    svg_path: Path | None,
    no_cache: bool,
    show_front: bool,
    profile_path: Path | None,
    micro_batch_size: int,
    memory: float | None,
    **numbers: Any,
) -> None:
    """Search pipeline schedules that train an actor and a critic together.

    You see each family's makespan, its speed-up over serial 1F1B and its peak of activation memory, and the timeline of
    the fastest family that fits. Times may be in any unit. If a model has half as many stages as the other, its stages
    take twice as long and hold twice as much. The critic's micro-batches follow from the actor's.

    \b
      dovetail schedule --actor-stages 8 --critic-stages 4 --micro-batches 16 \\
          --actor-forward 5 --critic-forward 2 --svg schedule.svg
    """
    if chunks is not None and family != "interleaved":
        raise UsageError("--chunks is only for --family interleaved.")
    family = family if chunks is None else interleaved_family(chunks).name
    try:
        if profile_path is None:
            problem = _problem(memory, **numbers)
        else:
            problem = _measured(profile_path, micro_batch_size, memory, **numbers)
    except ProblemError as error:
        raise UsageError(f"{error}.") from error
    console = Console()
    if not COMPILED:
        remedy = f"pip install '{DISTRIBUTION}[schedules]'"
        click.echo(f"Warning: numba is not installed; the search is slow and weak. Install it with: {remedy}", err=True)
    status = console.status("searching")

    def progress(what: str, makespan: float, peak: float) -> None:
        status.update(f"{what}: makespan {makespan:g}, peak activation {peak:g}")

    effort = SearchEffort(seconds, time.monotonic, workers or os.cpu_count() or 1, seed, progress=progress)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dovetail" / "schedules"
    store = {} if no_cache else _FolderStore(folder)

    def finder(p: ScheduleProblem, name: str, e: SearchEffort) -> Schedule:
        return cached_find(p, name, e, store)

    try:
        with status:
            if family == "auto":
                own = [DEDICATED.name] if problem.ranks > 1 else []
                choice = choose(problem, effort, [*family_names(problem, chunked=True), *own], finder)
            else:
                best = finder(problem, family, effort)
                names = [n for n in ("serial", "overlapped", "stitched", "zb-v") if n != family]
                others = _others(problem, names, effort, finder)
                choice = Choice(best, {family: best, **others}, {})
    except ProblemError as error:
        raise UsageError(f"{error}.") from error
    check_steps(choice.best.instance.problem, steps(choice.best))
    _show(console, problem, choice)
    if show_front:
        with console.status("searching"):
            _show_front(console, problem, choice, effort, finder)
    for path, write in ((output, _json), (svg_path, svg)):
        if path is None:
            continue
        try:
            path.write_text(write(choice.best), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
        console.print(f"Written: {path}", highlight=False, markup=False, soft_wrap=True)


def _problem(memory: float | None, **numbers: Any) -> ScheduleProblem:
    for name in ("actor_forward", "critic_forward"):
        if numbers[name] is None:
            raise UsageError(f"--{name.replace('_', '-')} is missing; give it, or measured times with --profile.")
    return fused_problem(memory_limit=memory, **numbers)


def _measured(path: Path, micro_batch_size: int, memory: float | None, **numbers: Any) -> ScheduleProblem:
    from dovetail.cli.common.plan_inputs import read_profile
    from dovetail.coordinator.schedules.training_schedule import profiled_problem

    read = read_profile(path)
    stages = (numbers["actor_stages"], numbers["critic_stages"])
    return profiled_problem(
        read,
        stages,
        numbers["micro_batches"],
        micro_batch_size,
        mini_batches=numbers["mini_batches"],
        memory_limit=memory,
    )


def _show_front(console: Console, problem: ScheduleProblem, choice: Choice, effort: SearchEffort, finder: Any) -> None:
    family = choice.best.family
    found = pareto(problem, family, effort, finder=finder)
    serial = choice.schedules.get("serial")
    baseline, unit = serial.makespan if serial else _serial(problem), serial_memory(problem)
    table = Table(title=f"{family}: less memory for more time", title_justify="left", show_edge=False)
    for heading in ("makespan", "speed-up", "peak", "of serial"):
        table.add_column(heading, justify="right")
    for s in found:
        table.add_row(f"{s.makespan:g}", f"{baseline / s.makespan:.3f}", f"{s.peak:g}", f"{s.peak / unit:.2f}")
    console.print()
    console.print(table)


def _others(problem: ScheduleProblem, names: list[str], effort: SearchEffort, finder: Any) -> dict[str, Schedule]:
    try:
        return choose(problem, effort, names, finder).schedules
    except ProblemError:  # none of these families fits, but the one that was asked for does
        return {}


def _json(found: Schedule) -> str:
    return json.dumps(document(found)) + "\n"


def _show(console: Console, problem: ScheduleProblem, choice: Choice) -> None:
    serial = choice.schedules.get("serial")
    baseline = serial.makespan if serial else _serial(problem)
    unit = serial_memory(problem)
    table = Table(show_edge=False)
    table.add_column("family")
    for heading in ("makespan", "bound", "speed-up", "loses", "peak", "of serial"):
        table.add_column(heading, justify="right")
    for name, found in choice.schedules.items():
        chosen = found is choice.best
        table.add_row(
            f"{name} *" if chosen else name,
            f"{found.makespan:g}",
            f"{found.bound:g}" if not family_of(name).fixed else "",
            f"{baseline / found.makespan:.3f}",
            "" if chosen else f"{100 * choice.loss(name):.1f} %",
            f"{found.peak:g}",
            f"{found.peak / unit:.2f}",
            style="bold" if chosen else None,
        )
    for name in choice.refused:
        table.add_row(name, "does not fit", *[""] * 5)
    limit = zero_bubble_limit(problem)
    table.add_row("no bubbles", f"{limit:g}", "", f"{baseline / limit:.3f}", "", "", "")
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
    for rank, row in enumerate(text_rows(best, width)):
        line = Text(f"rank {rank:<3} ")
        for character, model in row:
            shown = character.lower() if model == 1 else character
            line.append(shown, style=("cyan", "yellow")[model] if model is not None else "dim")
        console.print(line, no_wrap=True, overflow="crop")


def _serial(problem: ScheduleProblem) -> float:
    return find(replace(problem, memory_limit=None), FAMILIES["serial"], SearchEffort()).makespan


class _FolderStore(MutableMapping[str, str]):
    """A folder as a mapping from keys to text. It keeps the answers of searches for later commands.

    Keys must be plain file names. Writes are atomic, so several commands may share a folder. The store only saves time.
    So a file that cannot be read counts as absent, and a failed write is ignored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: str) -> Path:
        if not key or not all(c.isalnum() or c in "-_" for c in key):
            raise KeyError(key)
        return self.folder / f"{key}.json"

    def __getitem__(self, key: str) -> str:
        try:
            return self._path(key).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: str) -> None:
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(value)
            os.replace(name, path)
        except OSError:
            return

    def __delitem__(self, key: str) -> None:
        try:
            self._path(key).unlink()
        except OSError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in sorted(self.folder.glob("*.json")))

    def __len__(self) -> int:
        return sum(1 for _ in self)
