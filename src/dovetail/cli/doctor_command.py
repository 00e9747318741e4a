"""`dovetail doctor`: checks whether this machine, or this pod, can run jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.protocol.process.extras import DISTRIBUTION, MARKS, Extra, is_installed
from dovetail.tools.doctor.finding import Finding, report

STYLES = {"skipped": "dim", "ok": "green", "warning": "yellow", "problem": "red"}
STATES = list(STYLES)


@click.command()
@click.option("--gpu", is_flag=True, help="Check only GPUs: driver, torch, NCCL and vLLM. To have no GPU is a problem.")
@click.option("--cluster", is_flag=True, help="Check only the cluster of kubectl's current context.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@click.pass_context
def doctor(ctx: click.Context, gpu: bool, cluster: bool, as_json: bool) -> None:
    """Check whether this machine can run jobs.

    It checks Python, packages, CPUs, memory, shared memory, disks, open files, ports, and the GPUs if there are any.
    Each line says what was found, and how to mend what is wrong. The exit code is 1 if there is a problem. On a cluster
    run it in a pod of the image that a job would use:

    \b
      kubectl run doctor --rm -it --restart=Never --image=IMAGE \\
        --overrides='{"spec": {"containers": [{"name": "doctor", "image": "IMAGE", "command":
          ["dovetail", "doctor", "--gpu"], "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}'
    """
    checks = list(_checks(gpu, cluster))
    if as_json:
        made = report(chain.from_iterable(checks))
        click.echo(json.dumps(made, indent=2))
    else:
        console = Console()
        with console.status("checking"):
            findings = list(chain.from_iterable(checks))
        made = report(findings)
        console.print(findings_table(findings))
    if not made["ok"]:
        ctx.exit(1)


def _checks(gpu: bool, cluster: bool) -> Iterator[Iterable[Finding]]:
    """Yields the checks that the user chose. By default they are those of the machine and of its GPUs."""
    if gpu:
        from dovetail.tools.doctor.gpu_checks import check_gpus

        yield check_gpus()
    if cluster:
        from dovetail.tools.doctor.cluster_checks import check_cluster

        yield check_cluster()
    if not gpu and not cluster:
        from dovetail.tools.doctor.machine_checks import check_gpus_if_any, check_machine

        yield check_machine(missing_extras, Path("runs"))
        yield check_gpus_if_any()


def missing_extras() -> list[tuple[str, str]]:
    """The extras that this machine lacks for runs, each with the command that installs all of them."""
    rollout: Extra = "rollout-gpu" if cuda_devices() else "rollout-cpu"
    needed: list[Extra] = ["coordinator", "trainer", rollout]
    found = []
    for extra in needed:
        if not all(map(is_installed, MARKS[extra])):
            found.append((f"the extra {extra}", f"pip install '{DISTRIBUTION}[coordinator,{rollout}]'"))
    return found


def findings_table(findings: Sequence[Finding]) -> Table:
    """A table with one row for each check. All findings about one GPU share a row, which shows the worst state."""
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
