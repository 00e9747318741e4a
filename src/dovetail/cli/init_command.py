"""`dovetail init`: writes the first files of a user's own job."""

from __future__ import annotations

import os
import shlex
from keyword import iskeyword
from pathlib import Path
from typing import Literal, get_args

import click

from dovetail.cli.common.one_line_options import as_yaml, manifest_of
from dovetail.manifest.fixed_names import PARQUET, DataKind
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.process.extras import require
from dovetail.tools.one_line import OneLine, kubernetes_name
from dovetail.tools.starter import (
    GAME,
    READ,
    Method,
    agent_job,
    agent_prompts,
    answer_field,
    commented,
    examples,
    first_job,
    rewards,
    save_tools_tokenizer,
    what_it_does,
)

# The reward function of jobs whose environment says what an episode earned.
EARNED = "dovetail.coordinator.rewards.earned:earned"


def job_name(folder: Path) -> str:
    """A job's name made from the folder's name, in the form that Kubernetes accepts."""
    found = kubernetes_name(folder.resolve().name)
    return found if found[:1].isalpha() else f"job-{found}".strip("-")


def first_record(method: Method, data: Path) -> tuple[list[str], bool]:
    """The fields of the first record that reward functions get, and whether the record is a response with a label.
    Raises UsageError if the method cannot read the record."""
    from dovetail.coordinator.data.data_error import DataError
    from dovetail.coordinator.data.data_files import source_files
    from dovetail.coordinator.data.formats import MESSAGE_FIELDS, PROMPT_FIELDS, convert, detect
    from dovetail.coordinator.data.text.chat_template import HumanAssistant, NotWritten
    from dovetail.tools.data_look import rows_of

    kinds: dict[str, DataKind] = {
        "sft": "demonstrations",
        "ppo": "preferences",
        "grpo": "prompts",
        "dpo": "preferences",
    }
    try:
        files = source_files(data, "--data")
        if files[0].name.endswith(PARQUET):
            require("dovetail init with Parquet files", ["coordinator"])
        where, row = next(rows_of(files), (str(data), {}))
        if isinstance(row, DataError):
            raise row
        fmt = detect(row, where, kinds[method])
        labelled = fmt == "Labelled"
        if labelled and method in ("ppo", "grpo"):
            raise DataError(
                f"{where}: the record has one response and a label, which only KTO learns from; take dovetail init "
                "dpo, or remove the label"
            )
        record = convert(row, fmt, kinds[method], HumanAssistant(), where)
        fields = getattr(record, "fields", {})
    except DataError as error:
        if not isinstance(error.__cause__, NotWritten):
            raise UsageError(str(error).removeprefix("--data.path: ")) from error
        # The record has calls of tools. The model's template may know them, and `validate --deep` checks that.
        fields = [name for name in row if name not in MESSAGE_FIELDS + PROMPT_FIELDS]
    return [name for name in fields if name.isidentifier() and not iskeyword(name)], labelled


@click.command("init")
@click.argument("method", type=click.Choice([*get_args(Method), "agent"]))
@click.argument("folder", metavar="[FOLDER]", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--model",
    help="A folder in Hugging Face format, or a model of a hub such as Qwen/Qwen2.5-0.5B.  [default: a tiny model from "
    "random weights]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    help="Your own records, a .jsonl, .json, .csv or .parquet file or a folder of them: demonstrations for sft, "
    "preferences for ppo and dpo, prompts for grpo.  [default: five examples are written]",
)
def init(method: Method | Literal["agent"], folder: Path, model: str | None, data: Path | None) -> None:
    """Write a first job into FOLDER: a commented job.yaml with what dovetail run --method means, five records of each
    data set, and for grpo a reward function. For agent: GRPO with an environment, a class whose methods are the tools
    of the model. No file is overwritten.

    \b
      dovetail init grpo sums
      cd sums && dovetail run job.yaml
    """
    agent, given = method == "agent", method
    method = "grpo" if method == "agent" else method
    if agent and data is not None:
        raise UsageError(
            "dovetail init agent writes its own prompts, whose fields its environment gets; leave --data out"
        )
    scratch = model is None
    is_folder = model is not None and Path(model).expanduser().is_dir()
    where = "tiny" if model is None else str(Path(model).expanduser().resolve()) if is_folder else model
    fields, labelled = (["answer"], False) if data is None else first_record(method, data)
    own = None if data is None else os.path.relpath(data.resolve(), folder.resolve())
    kinds: tuple[DataKind, ...] = ("preferences",) if labelled else READ[method]
    sources = {kind: [own or f"{kind}.jsonl"] for kind in kinds}
    right = "words" if answer_field(fields) is None else "correct"
    calls = [EARNED] if agent else [f"rewards:{right}", "rewards:short"] if method == "grpo" else []
    line = OneLine(method, where, **sources, rewards=calls)
    local = frozenset(name for names in sources.values() for name in names) | (
        {where} if scratch or is_folder else set()
    )
    meant = manifest_of(line, local, folder.resolve(), cpu=scratch)
    manifest = first_job(meant, method, scratch=scratch, own=own is not None, labelled=labelled)
    manifest = agent_job(manifest, scratch) if agent else manifest
    name = manifest["metadata"]["name"] = job_name(folder)
    what = what_it_does(given, labelled)
    files = {"job.yaml": commented(as_yaml(manifest), name, manifest["spec"]["stages"], what, scratch)}
    if agent:
        files |= {"prompts.jsonl": agent_prompts(), "game.py": GAME}
    else:
        files |= examples(method) if own is None else {}
        files |= {"rewards.py": rewards(fields)} if method == "grpo" else {}
    tokenizer = ["tokenizer"] if agent and scratch else []
    there = [name for name in [*files, *tokenizer] if os.path.lexists(folder / name)]
    if there:
        raise UsageError(f"{folder / there[0]} exists; name another folder, or delete the file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        for name in tokenizer:
            save_tools_tokenizer(folder / name)
    except OSError as error:
        raise RunError(f"cannot write {error.filename}: {error.strerror}") from error
    click.echo(f"Wrote {', '.join(str(folder / name) for name in [*files, *tokenizer])}.")
    go = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    click.echo(f"Next:  {go}dovetail validate job.yaml --deep && dovetail run job.yaml")
