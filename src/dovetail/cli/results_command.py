"""`dovetail report`: shows the results of a finished run."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from dovetail.cli.job_arguments import run_dir_argument


@click.command()
@run_dir_argument
def report(run_dir: Path) -> None:
    """Show a run's table again, and write its report.html again."""
    from dovetail.coordinator.reporting.report.report import write_report
    from dovetail.coordinator.reporting.report.run_summary import read_summary, show

    console = Console()
    show(console, read_summary(run_dir))
    console.print(f"\nReport:  {write_report(run_dir)}", highlight=False, markup=False, soft_wrap=True)
