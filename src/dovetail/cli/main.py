"""The `dovetail` command. Exit codes are 0 (done), 1 (a run failed), 2 (bad manifest or usage) and 130 (interrupted).

A new command needs its function in this folder and a line in `COMMANDS`."""

from __future__ import annotations

import io
import re
import sys
from typing import Any, NoReturn

import click

from dovetail.cli.audit_command import audit
from dovetail.cli.chat_command import chat, serve
from dovetail.cli.data_command import data
from dovetail.cli.debug import debug
from dovetail.cli.doctor_command import doctor
from dovetail.cli.init_command import init
from dovetail.cli.manifests import explain, validate
from dovetail.cli.model_command import model
from dovetail.cli.planning import plan
from dovetail.cli.profile_command import profile
from dovetail.cli.push_command import export, push
from dovetail.cli.run import INTERRUPTED, run
from dovetail.cli.samples_command import samples
from dovetail.cli.schedule_command import schedule
from dovetail.cli.ui_command import report, ui
from dovetail.manifest.documents import ManifestError
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.process.extras import version as installed_version


class _Failed(click.ClickException):
    """The command failed. The message has one sentence per line for stderr."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        for sentence in self.message.splitlines():
            click.echo(f"Error: {sentence}", err=True, file=file)


class _Refused(_Failed):
    """The manifest or the command line is wrong."""

    exit_code = 2


# What to write in place of options that other tools have.
_OTHER_OPTIONS = {
    **dict.fromkeys(
        ("--gpus", "--num-gpus", "--ngpus", "--gpu", "--nproc-per-node"),
        "The manifest says it: --set spec.groups[0].gpu.perPod=N, with spec.groups[0].replicas pods. "
        "CUDA_VISIBLE_DEVICES chooses GPUs of this machine.",
    ),
    **dict.fromkeys(
        ("--lr", "--learning-rate", "--epochs", "--steps", "--iterations", "--batch-size", "--max-tokens"),
        "The manifest says it: --set changes a field of it, and dovetail explain WORD finds the field.",
    ),
    **dict.fromkeys(("--output", "--output-dir", "--out"), "--run-dir says where the run's files go."),
    **dict.fromkeys(("--config", "--file", "--manifest", "-f", "-c"), "The manifest is an argument without an option."),
    **dict.fromkeys(("--dataset", "--data"), "Data is given as --prompts, --preferences or --demonstrations."),
}


class _Group(click.Group):
    """Turns the project's errors into sentences and exit codes. Lists commands in the order in which people use
    them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        from dovetail.planner.make_plan import PlanError

        try:
            return super().invoke(ctx)
        except ManifestError as error:
            raise _Refused("\n".join(error.errors)) from error
        except (UsageError, PlanError) as error:
            raise _Refused(str(error)) from error
        except click.NoSuchOption as error:
            hint = _OTHER_OPTIONS.get(error.option_name)
            there = {name for each in (error.ctx.command.params if error.ctx else ()) for name in each.opts}
            # Only for a command that has what the hint names.
            if hint is None or not there.issuperset(["manifest", *re.findall("--[a-z-]+", hint)]):
                raise
            raise click.NoSuchOption(error.option_name, f"{error.message} {hint}", ctx=error.ctx) from error
        except RunError as error:
            raise _Failed(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"dovetail {installed_version()}")
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """Train a model with human feedback, from one manifest.

    A job has up to three stages: supervised fine-tuning, a reward model, and PPO.

    \b
    A first run:
      dovetail run examples/quickstart.yaml
      dovetail chat runs/quickstart
    """


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"dovetail {installed_version()}")


COMMANDS = (
    init,
    data,
    run,
    ui,
    samples,
    chat,
    serve,
    push,
    export,
    report,
    audit,
    validate,
    plan,
    schedule,
    profile,
    doctor,
    model,
    explain,
    debug,
    version,
)
for command in COMMANDS:
    cli.add_command(command)


def main() -> NoReturn:
    """Entry point of the `dovetail` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model may write characters that the terminal's encoding does not have. This must not end a run.
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="dovetail")
    raise SystemExit(0)  # never reached, because click exits; the type checker needs it


if __name__ == "__main__":
    main()
