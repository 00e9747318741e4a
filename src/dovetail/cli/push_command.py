"""`dovetail export` writes a model from a checkpoint of a run. `dovetail push` sends a run's model to a hub, with the
hub's own client."""

from __future__ import annotations

import re
from pathlib import Path

import click

from dovetail.cli.job_arguments import checkpoint_option, iteration_option, run_dir_argument
from dovetail.coordinator.reporting.model_card import LANGUAGE_MODELS
from dovetail.manifest.types import TRAINED_MODELS
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.process.extras import require
from dovetail.tools.serving.served_result import model_folder

_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


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


def push_model(
    folder: Path,
    repository: str,
    *,
    message: str,
    private: bool = False,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> str:
    """Upload the folder to `repository` (owner/name). The repository is created if it does not exist. Returns the
    commit's address. `revision`: a branch, which is created too. Files that are only in the repository stay.
    `endpoint`, `token`: the hub's address, and a token for it. Without them huggingface_hub reads its environment
    variables. Raises UsageError for a name that is not valid, and RunError with one sentence."""
    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository!r} is no repository of a hub; write owner/name")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi(endpoint, token, library_name="dovetail")
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            revision=revision,
            commit_message=message,
            ignore_patterns=["*.tmp"],
        )
    except HFValidationError as error:
        raise UsageError(f"{repository!r} is no repository of a hub: {error}") from error
    except LocalTokenNotFoundError as error:
        raise RunError(f"the hub wants to know who you are; {_LOGIN}") from error
    except HfHubHTTPError as error:
        raise RunError(_explained(error.response.status_code, repository, api.endpoint, str(error))) from error
    except (OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__ or error
        raise RunError(f"the model could not be sent to {api.endpoint}: {_first(str(cause)) or repr(cause)}") from error
    except Exception as error:
        # The client's HTTP library has errors of its own. It is httpx, or a successor whose name begins so.
        if not type(error).__module__.partition(".")[0].startswith("httpx"):
            raise
        raise RunError(f"{api.endpoint} does not answer: {_first(str(error)) or type(error).__name__}") from error
    return str(done.commit_url)


def _explained(status: int, repository: str, endpoint: str, said: str) -> str:
    if status == 401:
        return f"{endpoint} does not accept the token, or there is none; {_LOGIN}"
    if status == 403:
        return f"the token may not write to {repository} on {endpoint}; use a token with write access to it"
    return f"{endpoint} refused the model: {_first(said)}"


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


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
