"""`dovetail doctor`: whether this machine, or this pod, can run jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.local.doctor.finding import Finding, report
from dovetail.supervision.errors import UsageError

STYLES = {"skipped": "dim", "ok": "green", "warning": "yellow", "problem": "red"}
STATES = list(STYLES)


@click.command()
@click.option("--gpu", is_flag=True, help="Check driver, GPUs, torch, NCCL and vLLM.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@click.pass_context
def doctor(ctx: click.Context, gpu: bool, as_json: bool) -> None:
    """Check whether this machine can run jobs.

    Each line says what was found, and how to mend what is wrong. The exit code is 1 if there is a problem. Run it on a
    GPU machine, or in a pod of the image that a job would use:

    \b
      kubectl run doctor --rm -it --restart=Never --image=IMAGE \\
        --overrides='{"spec": {"containers": [{"name": "doctor", "image": "IMAGE", "command":
          ["dovetail", "doctor", "--gpu"], "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}'
    """
    if not gpu:
        raise UsageError("dovetail doctor checks GPUs; give --gpu.")
    from dovetail.local.doctor.gpu_checks import check_gpus

    if as_json:
        made = report(check_gpus())
        click.echo(json.dumps(made, indent=2))
    else:
        console = Console()
        with console.status("checking"):
            findings = list(check_gpus())
        made = report(findings)
        console.print(findings_table(findings))
    if not made["ok"]:
        ctx.exit(1)


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row for each subject. All findings about one GPU are one row, with the worst of their states."""
    rows: dict[str, list[Finding]] = {}
    for finding in findings:
        of_gpu = re.match(r"GPU \d+", finding.check)
        rows.setdefault(of_gpu[0] if of_gpu else finding.check, []).append(finding)
    table = Table(show_edge=False, box=None, padding=(0, 1))
    for heading in ("", "check", "finding"):
        table.add_column(heading, overflow="fold")
    for name, found in rows.items():
        worst = max((f.state for f in found), key=STATES.index)
        table.add_row(Text(worst, STYLES[worst]), Text(name), Text("\n").join(map(_sentences, found)))
    return table


def _sentences(finding: Finding) -> Text:
    mend = Text.assemble(" ", ("To mend it: ", "bold"), f"{finding.mend}.") if finding.mend else Text()
    style = STYLES[finding.state] if finding.state in ("warning", "problem") else ""
    return Text.assemble((f"{finding.says}.", style), mend)
