"""`dovetail validate` and `dovetail explain`: a manifest, checked or described."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.cli.job_arguments import load_job, manifest_argument, set_option
from dovetail.supervision.errors import UsageError


@click.command()
@manifest_argument
@set_option
def validate(manifest: Path, overrides: tuple[str, ...]) -> None:
    """Check a manifest without running it.

    Each problem is one sentence that names the field and the fix. The exit code is then 2. A warning names each field
    that is accepted but has no effect yet.
    """
    job, plan = load_job(manifest, overrides)
    rollouts = f", {len(plan.rollouts)} rollouts" if plan.rollouts else ""
    stages = ", ".join(stage.value for stage in job.spec.stages)
    ranks = f"{plan.world_size} trainer rank{'s' if plan.world_size != 1 else ''}"
    click.echo(f"{manifest} is valid: {job.metadata.name}, stages {stages}; {ranks}{rollouts}.")


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
