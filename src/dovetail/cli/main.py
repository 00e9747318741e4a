"""The `dovetail` command. Exit codes: 0 done, 1 a run failed, 2 bad manifest or usage, 130 interrupted."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console

from dovetail.cli.overrides import apply_overrides
from dovetail.cli.profile import profile
from dovetail.cli.run import INTERRUPTED
from dovetail.cli.run import run_job as run_to_the_end
from dovetail.cli.schedule import schedule
from dovetail.manifest.manifest import ManifestError, parse, read_yaml
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.plan import Plan
from dovetail.supervision.errors import RunError, UsageError

if TYPE_CHECKING:
    from dovetail.planner.placement.strategies import Strategy


class _Failed(click.ClickException):
    """Sentences for stderr, one a line."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        for sentence in self.message.splitlines():
            click.echo(f"Error: {sentence}", err=True, file=file)


class _Refused(_Failed):
    """The manifest or the command line is wrong."""

    exit_code = 2


class _Group(click.Group):
    """Turns the project's errors into sentences and exit codes, and lists commands in the order of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        from dovetail.planner.simple import PlanError

        try:
            return super().invoke(ctx)
        except ManifestError as error:
            raise _Refused("\n".join(error.errors)) from error
        except (UsageError, PlanError) as error:
            raise _Refused(str(error)) from error
        except RunError as error:
            raise _Failed(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


_manifest = click.argument("manifest", metavar="JOB.yaml", type=click.Path(path_type=Path))
_run_dir = click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
_new_file = click.Path(path_type=Path, dir_okay=False)
_set = click.option(
    "--set",
    "overrides",
    metavar="FIELD=VALUE",
    multiple=True,
    help="Change a field of the manifest, for example spec.ppo.iterations=3 or spec.groups[0].replicas=1. "
    "May be given more than once.",
)
_seed = click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Short for --set spec.seed=SEED.")


def _load(
    manifest: Path,
    overrides: Sequence[str],
    seed: int | None = None,
    hardware_path: Path | None = None,
    profile_path: Path | None = None,
    run_dir: Path | None = None,
    planned: bool = False,
    cpu: bool | None = None,
) -> tuple[RLHFJob, Plan]:
    """The checked job with every default filled in, and its plan; warnings go to stderr. Files must be there. Times
    are those of `profile_path`, or of a profile in the run directory. `planned`: only, so that groups with GPUs may be
    those of a cluster. `cpu`: the job is to run here, on CPUs alone or as its groups say."""
    from dovetail.cli.planning import configurations, hardware, local_profile
    from dovetail.manifest.checks.files import layer_counts
    from dovetail.manifest.checks.validation import warnings
    from dovetail.planner.simple import make_plan

    written, job, base = _read(manifest, overrides, seed, cpu=cpu)
    configs = configurations(job.spec, base)
    measured = local_profile(profile_path, run_dir or Path("runs") / job.metadata.name)
    made = make_plan(job.spec, layer_counts(job.spec, base), configs, hardware(hardware_path), measured)
    elsewhere = planned and not all(group.on_cpu for group in written.spec.groups)
    for warning in dict.fromkeys([*warnings(written.spec, cluster=elsewhere), *made.warnings]):
        click.echo(f"Warning: {warning}", err=True)
    return job, made


def _read(
    manifest: Path, overrides: Sequence[str], seed: int | None = None, cpu: bool | None = None
) -> tuple[RLHFJob, RLHFJob, Path]:
    """The checked job as it was written, and with every default filled in; and the folder that its paths start at."""
    from dovetail.manifest.accelerators import no_gpus, on_cpus
    from dovetail.manifest.checks.validation import absolute_paths, check, check_files, resolve
    from dovetail.supervision.devices import cuda_devices

    document = read_yaml(manifest)
    if isinstance(document, dict):
        apply_overrides(document, [*overrides, *([f"spec.seed={seed}"] if seed is not None else [])])
    written = parse(document)
    if cpu:
        written = written.model_copy(update={"spec": on_cpus(written.spec)})
    elif cpu is not None and (problem := no_gpus(written.spec, len(cuda_devices()))):
        raise ManifestError([f"{problem}."])
    if errors := check(written.spec):
        raise ManifestError(errors)
    base = manifest.resolve().parent
    if errors := check_files(written.spec, base):
        raise ManifestError(errors)
    return written, absolute_paths(written.model_copy(update={"spec": resolve(written.spec)}), base), base


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """RLHF from one manifest: supervised fine-tuning, a reward model and PPO, on this machine.

    \b
    A first run:
      dovetail run examples/quickstart.yaml
      dovetail chat runs/quickstart
    """


@cli.command()
@_manifest
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in the run directory from where it stopped; with --set spec.ppo.iterations=N, extend it.",
)
@click.option("--overwrite", is_flag=True, help="Delete an earlier run in the run directory first.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Where the run's files go.  [default: runs/<job name>]"
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Times from dovetail profile, for the plan and the first schedule of actor and critic.  [default: "
    "profile.json in the run directory, if there is one]",
)
@_set
@_seed
@click.option("--cpu", is_flag=True, help="Run on CPUs, also what the manifest's groups want GPUs for.")
@click.option("-v", "--verbose", is_flag=True, help="Show the coordinator's events as they happen.")
def run(
    manifest: Path,
    resume: bool,
    overwrite: bool,
    run_dir: Path | None,
    profile_path: Path | None,
    overrides: tuple[str, ...],
    seed: int | None,
    cpu: bool,
    verbose: bool,
) -> None:
    """Run a job on this machine.

    Starts a coordinator, the trainers, and a vLLM server and a scorer for every rollout, keeps them running (a process
    that dies is started again), and ends with a table and report.html. Ctrl-C stops everything within seconds; --resume
    continues.

    The run directory gets the trained models (models/actor, models/reward, ...), summary.json, checkpoints, logs,
    TensorBoard files and a Perfetto trace of every iteration.
    """
    if resume and overwrite:
        raise UsageError("--resume continues the earlier run and --overwrite deletes it; give one of them")
    from dovetail.cli.planning import local_profile

    job, plan = _load(manifest, overrides, seed, profile_path=profile_path, run_dir=run_dir, cpu=cpu)
    folder = run_dir or Path("runs") / job.metadata.name
    measured = local_profile(profile_path, folder)
    given = [f"--set {shlex.quote(o)}" for o in overrides]
    given += [f"--seed {seed}"] if seed is not None else []
    given += ["--cpu"] if cpu else []
    given += [f"--run-dir {shlex.quote(str(run_dir))}"] if run_dir is not None else []
    hint = " ".join(["dovetail run", shlex.quote(str(manifest)), *given, "--resume"])
    code = run_to_the_end(
        job,
        plan,
        folder,
        resume=resume,
        overwrite=overwrite,
        verbose=verbose,
        console=Console(),
        hint=hint,
        profile=measured,
    )
    if code:
        click.get_current_context().exit(code)


@cli.command()
@_run_dir
@click.option(
    "--model",
    type=click.Choice(["actor", "sft", "actor-ema"]),
    default="actor",
    show_default=True,
    help="Which of the run's models to talk with.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Longest reply, tokens.")
@click.option(
    "--temperature",
    type=click.FloatRange(0.0),
    default=0.7,
    show_default=True,
    help="0: always the likeliest token.",
)
def chat(run_dir: Path, model: str, max_tokens: int, temperature: float) -> None:
    """Talk with a run's model.

    /reset forgets the dialogue so far, /quit ends it. Lines may also be piped in:

    \b
      echo "hello there" | dovetail chat runs/quickstart
    """
    from dovetail.local.chat import ChatModel, Sampling, converse

    interactive = sys.stdin.isatty()
    loaded = ChatModel(run_dir, model)
    if interactive:
        click.echo(f"Talking with {run_dir / 'models' / model}. /reset starts anew, /quit ends.")

    def lines() -> Iterator[str]:
        if not interactive:
            yield from sys.stdin
            return
        while True:
            try:
                yield input("you> ")
            except EOFError:
                click.echo()
                return

    converse(loaded, lines(), lambda text: click.echo(text, nl=False), Sampling(max_tokens, temperature))


@cli.command()
@_run_dir
def report(run_dir: Path) -> None:
    """Show a run's table again and write its report.html anew."""
    from dovetail.local.report.report import write_report
    from dovetail.local.report.summary import read_summary, show

    console = Console()
    show(console, read_summary(run_dir))
    console.print(f"\nReport:  {write_report(run_dir)}", highlight=False, soft_wrap=True)


@cli.command()
@_manifest
@_set
def validate(manifest: Path, overrides: tuple[str, ...]) -> None:
    """Check a manifest without running it.

    Every problem is one sentence that names the field and the fix; exit code 2 if there are any. Fields that are
    accepted but not executed yet are warned of.
    """
    job, plan = _load(manifest, overrides)
    rollouts = f", {len(plan.rollouts)} rollouts" if plan.rollouts else ""
    stages = ", ".join(stage.value for stage in job.spec.stages)
    ranks = f"{plan.world_size} trainer rank{'s' if plan.world_size != 1 else ''}"
    click.echo(f"{manifest} is valid: {job.metadata.name}, stages {stages}; {ranks}{rollouts}.")


@cli.command()
@_manifest
@_set
@click.option("--json", "as_json", is_flag=True, help="Print plan.json.")
@click.option("-o", "--output", type=_new_file, help="Write plan.json here.")
@click.option(
    "--html", "html_path", type=_new_file, help="Write a page with the predicted iteration's timeline by GPU."
)
@click.option(
    "--inventory",
    "inventory_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also find the best placement on these GPUs: a YAML or JSON file, see docs/planner.md.",
)
@click.option("--cluster", is_flag=True, help="As --inventory, with the nodes that kubectl sees.")
@click.option(
    "--strategy",
    type=click.Choice(["search", "prior", "grid", "similar"]),
    default="search",
    show_default=True,
    help="How to choose on an inventory: ours; APP's rules, APP's grid or PUZZLE's descent, to compare with.",
)
@click.option(
    "--hardware",
    "hardware_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measured figures of GPUs, which go before the data sheets'.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="This machine's times from dovetail profile --iterations, for groups on CPUs.  [default: profile.json in "
    "runs/<job name>, if there is one]",
)
def plan(
    manifest: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    html_path: Path | None,
    inventory_path: Path | None,
    cluster: bool,
    strategy: Strategy,
    hardware_path: Path | None,
    profile_path: Path | None,
) -> None:
    """Show what would run where: processes, parallelism and batches, with predicted times and memory.

    \b
      dovetail plan job.yaml --inventory gpus.yaml --html plan.html
    """
    from dovetail.cli import planning
    from dovetail.planner.simple import PlanError

    if inventory_path is not None and cluster:
        raise UsageError("--inventory and --cluster both name the GPUs; give one of them")
    measured = planning.hardware(hardware_path)
    there = planning.inventory(inventory_path, cluster, measured)
    groups: Plan | str
    try:
        job, groups = _load(manifest, overrides, hardware_path=hardware_path, profile_path=profile_path, planned=True)
    except PlanError as error:
        if there is None or as_json or output is not None:
            raise
        _, job, _ = _read(manifest, overrides)
        groups = str(error)
    base = manifest.resolve().parent
    configs = planning.configurations(job.spec, base)
    if isinstance(groups, Plan):
        text = groups.model_dump_json(by_alias=True, indent=2)
        if output is not None:
            planning.write(output, text + "\n")
        if as_json:
            click.echo(text)
    console, notes = Console(), list[str]()
    chosen = None
    if there is not None:
        chosen, notes = planning.on_inventory(job.spec, configs, there, strategy)
        if not as_json:
            planning.show_inventory(console, chosen, notes, groups)
    elif isinstance(groups, Plan):
        chosen = planning.on_groups(job.spec, configs, measured) if html_path is not None else None
        if not as_json:
            planning.show_groups(console, groups, lambda: planning.unpredicted(manifest, job, configs, profile_path))
    if html_path is not None:
        planning.write_html(html_path, job.metadata.name, chosen, notes)


cli.add_command(schedule)
cli.add_command(profile)


@cli.command()
@click.argument("path", metavar="PATH", default="RLHFJob")
def explain(path: str) -> None:
    """Describe a field of the manifest: type, default, subfields.

    \b
      dovetail explain RLHFJob.spec.ppo
    """
    from dovetail.manifest.describe.explain import explain as describe

    try:
        click.echo(describe(path))
    except (KeyError, ValueError) as error:
        raise UsageError(str(error.args[0] if error.args else error)) from error


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"dovetail {importlib.metadata.version('dovetail')}")


def main() -> NoReturn:
    """Entry point of the `dovetail` command."""
    cli(prog_name="dovetail")
    raise SystemExit(0)  # click has left already; for the type checker


if __name__ == "__main__":
    main()
