"""`dovetail data`: shows what is in a data file, before a job reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.coordinator.reporting.sample_texts import printable
from dovetail.manifest.checks.hub_names import hub_problem
from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.fixed_names import DATA_KINDS
from dovetail.manifest.types import Data, DataFormat, DataSource, TemplateUse
from dovetail.protocol.errors import UsageError
from dovetail.protocol.process.extras import require

if TYPE_CHECKING:
    from dovetail.tools.data_look import DataLook
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.text import tokenizer
from dovetail.manifest.types import HubAccess

SHOWN_CHARACTERS = 2000


@click.command("data")
@click.argument("path", metavar="FILE_OR_HUB", type=click.Path(path_type=Path))
@click.option(
    "--model", metavar="FOLDER_OR_HUB", help="Count tokens, and write dialogues, with this model's tokenizer."
)
@click.option(
    "--as", "kind", type=click.Choice(DATA_KINDS), help="What a job would read the records as.  [default: a guess]"
)
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["Auto", *get_args(DataFormat)]),
    default="Auto",
    show_default=True,
    help="The field `format` of a job's source.",
)
@click.option(
    "--job",
    type=click.Path(path_type=Path),
    help="Take data.maxPromptTokens, data.maxTokens, data.chatTemplateKwargs and, without --model, the model from this "
    "manifest.",
)
@click.option("--max-prompt-tokens", type=click.IntRange(1), help="data.maxPromptTokens of the job.  [default: 512]")
@click.option("--system", metavar="TEXT", help="The field `systemPrompt` of a job's source.")
@click.option(
    "--template",
    type=click.Choice(get_args(TemplateUse)),
    default="Auto",
    show_default=True,
    help="The field `template` of a job's source.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="data.maxTokens of the job.  [default: 1024]")
@click.option("--subset", metavar="NAME", help="The field `subset` of a hub's data set.")
@click.option(
    "--split", default="train", show_default=True, metavar="NAME", help="The field `split` of a hub's data set."
)
@click.pass_context
def data(
    ctx: click.Context,
    path: Path,
    model: str | None,
    kind: str | None,
    fmt: str,
    job: Path | None,
    max_prompt_tokens: int | None,
    max_tokens: int | None,
    system: str | None,
    template: str,
    subset: str | None,
    split: str,
) -> None:
    """Show what is in a data file, in a folder of them, or in a data set of a hub (owner/name).

    You see the format, the first record as the model gets it, the lengths in tokens and what is cut, and the first bad
    line. Every record is read. The exit code is 2 if one is bad.

    \b
      dovetail data prompts.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --as prompts
    """
    require("dovetail data", ["coordinator"])
    from dovetail.cli.data_command import named_tokenizer
    from dovetail.coordinator.data.data_error import DataError
    from dovetail.coordinator.data.text.chat_template import WithSystem, chat_format
    from dovetail.coordinator.data.text.tokenize import Encoder
    from dovetail.tools.data_look import look, look_at_hub

    console = Console()
    try:
        lengths, of_job, on_hub = (Data(), None, False) if job is None else _of_job(job)
        named, encoder = model or of_job, None
        if named is not None:
            limits = max_prompt_tokens or lengths.max_prompt_tokens, max_tokens or lengths.max_tokens
            options = lengths.chat_template_kwargs
            tokenizer = named_tokenizer(named, "--model", options, on_hub=on_hub and model is None)
            encoder = Encoder(tokenizer, *limits)
        with console.status("reading"):
            chat = chat_format(None if encoder is None else encoder.tokenizer)
            if system is not None:
                chat = WithSystem(chat, system)
            if not path.exists() and hub_problem(str(path), "file, and no data set", Path()) is None:
                fields = {
                    "huggingFace": str(path),
                    "subset": subset,
                    "split": split,
                    "format": fmt,
                    "template": template,
                }
                source = DataSource.model_validate(fields)
                found = look_at_hub(source, "FILE", kind, encoder, chat)  # type: ignore[arg-type]
            elif subset is not None or split != "train":
                raise UsageError(
                    f"--subset and --split are for a data set of a hub (owner/name), but {path} is not one"
                )
            else:
                found = look(path.expanduser(), "FILE", kind, fmt, encoder, chat, template)  # type: ignore[arg-type]
    except DataError as error:
        raise UsageError(str(error).removeprefix("FILE.path: ").removeprefix("FILE.huggingFace: ")) from error
    show(console, found, guessed=kind is None)
    if encoder is None:
        console.print("\nLengths in tokens: give --model.", highlight=False)
    if found.first_error is not None:
        click.echo(f"Error: {found.first_error}", err=True)
        if found.errors > 1:
            click.echo(f"Error: {found.errors} records are bad; this is the first.", err=True)
        ctx.exit(2)


def _of_job(manifest: Path) -> tuple[Data, str | None, bool]:
    """A job's `data`, its tokenizer's folder or name on a hub, and whether the manifest says that it is on a hub.
    Raises ManifestError."""
    spec = load_manifest(manifest).spec
    source = spec.models.actor.source
    if spec.models.tokenizer.path is not None or source is None:
        return spec.data, spec.models.tokenizer.path, False
    return spec.data, source.path or source.hugging_face, source.hugging_face is not None


def show(console: Console, found: DataLook, guessed: bool) -> None:
    """Print the facts, the first record and the table of lengths. `guessed`: the kind of the records was guessed."""
    facts = Table.grid(padding=(0, 2))
    many = f" in {len(found.files)} files" if len(found.files) > 1 else ""
    read_as = f"{found.kind}{', a guess from the first record; --as names another' if guessed else ''}"
    known = found.records or found.format != "Auto"
    bad = f", and {found.errors:,} bad" if found.errors else ""
    for name, value in (
        ("Records", f"{found.records:,}{many}{bad}"),
        # If no line of a file is a record, these are not known.
        *([("Format", found.format), ("Read as", read_as), ("Template", found.template)] if known else []),
        *([("Tools", f"named by {found.tools:,} record{'s' * (found.tools > 1)}")] if found.tools else []),
        *([("Not used", ", ".join(found.unused))] if found.unused else []),
    ):
        facts.add_row(Text(name, "bold"), Text(value))
    console.print(facts)
    if found.example is not None:
        for title, text in example(found):
            console.print(Text(f"\n{title}", "bold"))
            shown = printable(text[:SHOWN_CHARACTERS])
            console.print(Text(shown if len(text) <= SHOWN_CHARACTERS else shown + " ..."))
    if found.lengths:
        table = Table(title="\nTokens", title_justify="left", show_edge=False, box=None, padding=(0, 2, 0, 0))
        table.add_column("")
        for heading in ("median", "95 %", "longest", "limit", "cut"):
            table.add_column(heading, justify="right")
        for row in found.lengths:
            cut = f"{row.cut:,} ({row.cut / found.records:.1%})" if row.cut else "0"
            table.add_row(row.part, f"{row.median:,}", f"{row.p95:,}", f"{row.longest:,}", f"{row.limit:,}", cut)
        console.print(table)
    for note in found.notes:
        console.print(Text(f"\n{note}"))


def example(found: DataLook) -> list[tuple[str, str]]:
    """The parts of the first record, each as (title, text)."""
    from dovetail.coordinator.data.records import Demonstration, Labelled, Preference

    record = found.example
    assert record is not None
    parts = [("Prompt of the first record", record.prompt)]
    if isinstance(record, Demonstration):
        return parts + [("Response, which is learnt" if learnt else "Given", text) for text, learnt in record.parts()]
    if isinstance(record, Labelled):
        return [*parts, (f"Response, which is {'good' if record.good else 'bad'}", record.response)]
    if isinstance(record, Preference):
        return [*parts, ("Chosen", record.chosen), ("Rejected", record.rejected)]
    if record.fields:
        parts.append(("Fields for reward functions", ", ".join(f"{k} = {v!r}" for k, v in record.fields.items())))
    return parts


def named_tokenizer(
    name: str, field: str, options: Mapping[str, Any] = MappingProxyType({}), on_hub: bool = False
) -> Any:
    """The tokenizer of a model's folder or of a hub's repository, before there is a run. No weights are downloaded.
    `field`: the manifest's field that names it. `options`: the options of its chat template, data.chatTemplateKwargs.
    `on_hub`: the name is one of a hub, even if a folder here has the same name. Raises DataError."""
    folder = Path(name).expanduser()
    if on_hub or not folder.is_dir():
        if not on_hub and (problem := hub_problem(name, "folder, and no model", Path())) is not None:
            raise DataError(f"{field} {name} {problem}")
        folder = Hub(HubAccess()).describe("tokenizer", field, name, None)
    return tokenizer.with_template_options(tokenizer.load(folder, field), options)
