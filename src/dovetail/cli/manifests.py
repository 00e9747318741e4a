"""`dovetail validate`: checks a manifest. `dovetail explain`: describes its fields."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

from dovetail.cli.doctor_command import findings_table
from dovetail.cli.job_arguments import class_option, load_job, located, manifest_argument, read_class, set_option
from dovetail.manifest.documents import ManifestError
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.errors import UsageError
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.extras import require


@click.command()
@manifest_argument
@set_option
@class_option
@click.option(
    "--deep",
    is_flag=True,
    help="Read every record of the data, load the tokenizer, call the reward functions on two prompts, count GPUs, and "
    "prove the models on small copies.",
)
def validate(manifest: Path, overrides: tuple[str, ...], class_path: Path | None, deep: bool) -> None:
    """Check a manifest without running it.

    Each problem is one sentence with file and line, the field and the fix. The exit code is then 2. A warning names
    each field that is accepted but has no effect yet.
    """
    job_class = read_class(manifest, overrides, class_path)
    job, plan = load_job(manifest, overrides, job_class=job_class)
    rollouts = f", {len(plan.rollouts)} rollouts" if plan.rollouts else ""
    stages = ", ".join(stage.value for stage in job.spec.stages)
    ranks = f"{plan.world_size} trainer rank{'s' if plan.world_size != 1 else ''}"
    if deep:
        _deeply(manifest, overrides, job, plan)
    given = f"; {job_class.told()}" if job_class is not None else ""
    click.echo(f"{manifest} is valid: {job.metadata.name}, stages {stages}; {ranks}{rollouts}{given}.")


def _deeply(manifest: Path, overrides: tuple[str, ...], job: RLHFJob, plan: Plan) -> None:
    """Show all findings. Raises ManifestError with the problems."""
    require("dovetail validate --deep", ["coordinator"])
    from dovetail.tools.deep_check import check_deeply

    console = Console()
    with console.status("checking"), TemporaryDirectory(prefix="dovetail-") as scratch:
        findings = list(check_deeply(job, plan, manifest.resolve().parent, Path(scratch)))
    console.print(findings_table([finding for finding in findings if finding.state != "problem"]))
    problems = [f"{f.says}{f'; {f.mend}' if f.mend else ''}." for f in findings if f.state == "problem"]
    with located(manifest, overrides):
        if problems:
            raise ManifestError(problems)


@click.command()
@click.argument("path", metavar="PATH", default="RLHFJob")
def explain(path: str) -> None:
    """Describe a field of the manifest.

    You see its type, its default and the fields below it.

    \b
      dovetail explain RLHFJob.spec.ppo
    """
    from dovetail.manifest.describe.explain import explain as describe

    try:
        click.echo(describe(path))
    except (KeyError, ValueError) as error:
        raise UsageError(str(error.args[0] if error.args else error)) from error
