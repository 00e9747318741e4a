"""`dovetail samples`: shows the model's answers in training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from dovetail.cli.job_arguments import run_dir_argument
from dovetail.coordinator.reporting.sample_texts import described, read, session_lines
from dovetail.protocol.errors import UsageError
from dovetail.protocol.files.run_rows import ORDERS, choose


@click.command()
@run_dir_argument
@click.option(
    "-i",
    "--iteration",
    "iterations",
    type=click.IntRange(-1),
    multiple=True,
    help="The samples of this PPO iteration. May be given more than once.  [default: the last one]",
)
@click.option(
    "--evaluation",
    is_flag=True,
    help="The answers of evaluations. -i is the iteration after which the weights were evaluated; 0: before PPO, -1: "
    "before SFT.",
)
@click.option(
    "--sort", "order", type=click.Choice(ORDERS), help="Sort by this figure, the highest first.  [default: by prompt]"
)
@click.option("--ascending", is_flag=True, help="With --sort: the lowest first.")
@click.option("--grep", metavar="REGEX", help="Only samples whose prompt or response contains this regular expression.")
@click.option(
    "--session",
    metavar="PROMPT/SAMPLE",
    help="Only this episode, turn by turn, such as 3/0 (spec.sessions).",
)
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=10, show_default=True, help="Show at most this many samples."
)
@click.option("--all", "everything", is_flag=True, help="Show all of them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, with all that is known of each sample.")
def samples(
    run_dir: Path,
    iterations: tuple[int, ...],
    evaluation: bool,
    order: str | None,
    ascending: bool,
    grep: str | None,
    session: str | None,
    limit: int,
    everything: bool,
    as_json: bool,
) -> None:
    """Show prompts with the model's responses and rewards.

    It can be called while the run goes on. The files are RUN_DIR/samples/iteration-*.jsonl and
    evaluation-*.jsonl.

    \b
    The five worst responses of the last iteration:
      dovetail samples runs/quickstart --sort reward --ascending -n 5
    """
    if ascending and order is None:
        raise UsageError("--ascending needs --sort")
    try:
        pattern = None if grep is None else re.compile(grep)
    except re.error as error:
        raise UsageError(f"--grep is not a regular expression: {error}") from error
    rows = read(run_dir, iterations, evaluation=evaluation)
    if session is not None:
        rows = [row for row in rows if f"{row['prompt_index']}/{row['sample_index']}" == session]
        if not rows:
            raise UsageError(f"there is no episode {session} in it; --session takes the numbers of prompt and sample")
    found = choose(rows, order, ascending, pattern)
    text = described if session is None else session_lines
    shown = found if everything else found[:limit]
    for row in shown:
        click.echo(json.dumps(row, ensure_ascii=False) if as_json else "\n".join(text(row)) + "\n")
    if not as_json:
        click.echo(f"{len(shown)} of {len(found)} samples." + (" --all shows all." if len(shown) < len(found) else ""))
