"""`dovetail push`: sends a run's model to a Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.cli.common.require_extras import require
from dovetail.cli.job_arguments import checkpoint_option, run_dir_argument
from dovetail.coordinator.reporting.model_card import LANGUAGE_MODELS
from dovetail.tools.hub_push import push_model
from dovetail.tools.serving.served_result import model_folder


@click.command()
@run_dir_argument
@click.argument("repository", metavar="OWNER/NAME")
@click.option(
    "--model",
    "--stage",
    "model",
    type=click.Choice([*LANGUAGE_MODELS, "reward"]),
    default="actor",
    show_default=True,
    help="Which of the run's models.",
)
@checkpoint_option
@click.option("--private", is_flag=True, help="If the repository is new, only you may see it.")
@click.option("--revision", metavar="BRANCH", help="A branch, which is made if there is none.  [default: main]")
@click.option("--message", help="The commit's message.")
def push(
    run_dir: Path,
    repository: str,
    model: str,
    iteration: int | None,
    private: bool,
    revision: str | None,
    message: str | None,
) -> None:
    """Send a run's model to a Hugging Face hub.

    The repository is made if there is none. HF_TOKEN, or `hf auth login`, says who you are; HF_ENDPOINT names another
    hub. Look at the model's README.md first: it has the manifest and the names of the data.

    \b
      dovetail push runs/quickstart me/my-model --private
    """
    require("dovetail push", ["coordinator"])
    folder = model_folder(run_dir, model, iteration)
    when = "" if iteration is None else f" after iteration {iteration}"
    said = message or f"{model} of {run_dir.resolve().name}{when}, trained with Dovetail"
    address = push_model(folder, repository, private=private, revision=revision, message=said)
    click.echo(f"Sent {folder} to {address}")
