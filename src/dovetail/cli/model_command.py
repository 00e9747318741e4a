"""`dovetail model check`: proves that Dovetail computes a model rightly, before anything is downloaded or started."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

from dovetail.cli.doctor_command import findings_table
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.manifest.types import HubAccess
from dovetail.protocol.errors import UsageError
from dovetail.protocol.process.extras import require
from dovetail.tools.doctor.finding import report


@click.group()
def model() -> None:
    """Look at a model before a job uses it."""


@model.command()
@click.argument("name", metavar="FOLDER_OR_HUB")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@click.pass_context
def check(ctx: click.Context, name: str, as_json: bool) -> None:
    """Prove on a small copy that Dovetail computes a model rightly.

    It reads config.json and no weights. The copy has the model's kinds of layers and settings. Its stages, its packed
    sequences, its gradients, ranks that share its layers or tokens, and its exported files must give what transformers
    gives. It says which cp fit the model's heads. The exit code is 1 if the model cannot be trained.

    \b
      dovetail model check Qwen/Qwen3-8B
    """
    require("dovetail model check", ["coordinator", "trainer"])
    from dovetail.protocol.messages import ModelRef
    from dovetail.tools.model_check import prove_model

    try:
        folder = Path(name) if Path(name).is_dir() else _downloaded(name)
    except DataError as error:
        raise UsageError(str(error)) from error
    console = Console()
    with console.status("proving"), TemporaryDirectory(prefix="dovetail-") as scratch:
        findings = prove_model(ModelRef(head="lm", path=str(folder)), Path(scratch))
    made = report(findings)
    if as_json:
        click.echo(json.dumps(made, indent=2))
    else:
        console.print(findings_table(findings))
    if not made["ok"]:
        ctx.exit(1)


def _downloaded(name: str) -> Path:
    """The folder of a Hub model, without its weights. A Hub name is owner/name, and no file or folder here."""
    path = Path(name)
    if name[:1] in (".", "/", "~") or name.count("/") > 1 or path.exists() or ("/" in name and path.parent.is_dir()):
        raise UsageError(f"{name} {'is no folder' if path.exists() else 'does not exist'}; name a model's folder.")
    return Hub(HubAccess()).describe("actor", "the model", name, None)
