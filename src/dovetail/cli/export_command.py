"""`dovetail export`: writes a model from a checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.cli.job_arguments import iteration_option, run_dir_argument
from dovetail.manifest.types import TRAINED_MODELS
from dovetail.protocol.process.extras import require


@click.command()
@run_dir_argument
@iteration_option
@click.option(
    "--model",
    type=click.Choice([name for name in TRAINED_MODELS if name != "actor-best"]),
    help="Which of the models in the checkpoint.  [default: that of the last stage which keeps one]",
)
@click.option("--adapter", is_flag=True, help="Only the LoRA adapters, as PEFT reads them.")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="A new folder for the model.",
)
def export(run_dir: Path, iteration: int | None, model: str | None, adapter: bool, output: Path) -> None:
    """Write a model of a run as a Hugging Face folder, also from a checkpoint.

    The run may be unfinished, stopped, failed, or still running: it goes on. The folder is like those that a run writes
    at its end (models/actor). Nothing but the CPU is used.

    \b
      dovetail export runs/quickstart -o my-model
      dovetail export runs/quickstart --iteration 10 --adapter -o my-adapter
    """
    require("dovetail export", ["coordinator", "trainer"])
    from dovetail.tools.checkpoint_export import export as write
    from dovetail.tools.checkpoint_export import find

    found = find(run_dir.resolve(), model, iteration, adapter)
    write(found, output.resolve(), adapter)
    what = f"the adapters of {found.model}" if adapter else found.model
    click.echo(f"Wrote {what} after {found.when} to {output}")
