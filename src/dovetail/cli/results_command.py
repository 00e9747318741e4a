"""`dovetail chat` and `dovetail report`: what a finished run has to show."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from dovetail.cli.common.extras import require
from dovetail.cli.job_arguments import run_dir_argument


@click.command()
@run_dir_argument
@click.option(
    "--model",
    type=click.Choice(["actor", "sft", "actor-best", "actor-ema"]),
    default="actor",
    show_default=True,
    help="The model to talk with.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="The longest reply, in tokens."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0),
    default=0.7,
    show_default=True,
    help="0 always takes the likeliest token.",
)
def chat(run_dir: Path, model: str, max_tokens: int, temperature: float) -> None:
    """Talk with a run's model.

    /reset forgets the dialogue so far. /quit ends the chat. You can also pipe lines in:

    \b
      echo "hello there" | dovetail chat runs/quickstart
    """
    require("dovetail chat", ["trainer"])
    from dovetail.local.chat import ChatModel, Sampling, converse

    interactive = sys.stdin.isatty()
    loaded = ChatModel(run_dir, model)
    if interactive:
        click.echo(f"Talking with {run_dir / 'models' / model}. /reset starts anew, /quit ends.")

    def lines() -> Iterator[str]:
        if not interactive:
            yield from sys.stdin
            return
        while True:
            try:
                yield input("you> ")
            except EOFError:
                click.echo()
                return

    converse(loaded, lines(), lambda text: click.echo(text, nl=False), Sampling(max_tokens, temperature))


@click.command()
@run_dir_argument
def report(run_dir: Path) -> None:
    """Show a run's table again, and write its report.html again."""
    from dovetail.local.report.report import write_report
    from dovetail.local.report.run_summary import read_summary, show

    console = Console()
    show(console, read_summary(run_dir))
    console.print(f"\nReport:  {write_report(run_dir)}", highlight=False, soft_wrap=True)
