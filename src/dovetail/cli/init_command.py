"""`dovetail init`: the first files of a job of one's own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import get_args

import click

from dovetail.local.starter import Method, starter
from dovetail.supervision.errors import RunError, UsageError

NAME_LENGTH = 40


def job_name(folder: Path) -> str:
    """A job's name made of the folder's: what Kubernetes takes as a name."""
    found = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:NAME_LENGTH].strip("-")
    return found if found[:1].isalpha() else f"job-{found}".strip("-")


@click.command("init")
@click.argument("method", type=click.Choice(get_args(Method)))
@click.argument("folder", metavar="[FOLDER]", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--model",
    help="A folder in Hugging Face format, or a model of a hub such as Qwen/Qwen2.5-0.5B.  [default: a tiny model from "
    "random weights]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    help="Your own records, a .jsonl, .jsonl.gz or .parquet file or a folder of them: demonstrations for sft, "
    "preferences for ppo, prompts for grpo.  [default: five examples are written]",
)
def init(method: Method, folder: Path, model: str | None, data: Path | None) -> None:
    """Write a first job into FOLDER: a commented job.yaml, five records of each data set, and for grpo a reward
    function. No file is overwritten.

    \b
      dovetail init grpo sums
      cd sums && dovetail run job.yaml
    """
    is_folder = model is not None and Path(model).expanduser().is_dir()
    if model is not None and not is_folder and not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise UsageError(f"--model {model} is no folder, and no model of a hub (owner/name)")
    where = str(Path(model).expanduser().resolve()) if model is not None and is_folder else model
    given = None if data is None else os.path.relpath(data.resolve(), folder.resolve())
    files = starter(method, job_name(folder), where, is_folder, given)
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise UsageError(f"{folder / there[0]} exists; name another folder, or delete the file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {error.filename}: {error.strerror}") from error
    click.echo(f"Wrote {', '.join(str(folder / name) for name in files)}.")
    here = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    click.echo(f"Next:  {here}dovetail run job.yaml")
