"""Defines the arguments that several commands share, and reads the job in a manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from dovetail.cli.common.one_line_options import apply_overrides
from dovetail.manifest.describe.crd import CLASS_PLURAL, GROUP
from dovetail.manifest.documents import FieldLines, ManifestError, parse, read_yaml, with_home
from dovetail.manifest.job_class import RLHFJobClass, parse_class
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.plan import Plan
from dovetail.protocol.prediction import too_small

manifest_argument = click.argument("manifest", metavar="JOB.yaml", type=click.Path(path_type=Path))
run_dir_argument = click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
iteration_option = click.option(
    "--iteration",
    type=click.IntRange(1),
    metavar="N",
    help="The checkpoint after this iteration of PPO, or this step of another stage.  [default: the newest]",
)
checkpoint_option = click.option(
    "--iteration",
    type=click.IntRange(1),
    metavar="N",
    help="The model in the checkpoint after this iteration of PPO, or this step of another stage.  "
    "[default: the finished model]",
)
new_file = click.Path(path_type=Path, dir_okay=False)
set_option = click.option(
    "--set",
    "overrides",
    metavar="FIELD=VALUE",
    multiple=True,
    help="Change a field of the manifest, for example spec.ppo.iterations=3 or spec.groups[0].replicas=1. "
    "May be given more than once.",
)
class_option = click.option(
    "--class",
    "class_path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The RLHFJobClass that the manifest names, as a YAML file.  [default: as kubectl gets it from the cluster]",
)
seed_option = click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Short for --set spec.seed=SEED.")


def load_job(
    manifest: Path | str,
    overrides: Sequence[str],
    seed: int | None = None,
    hardware_path: Path | None = None,
    profile_path: Path | None = None,
    run_dir: Path | None = None,
    planned: bool = False,
    resume: bool = False,
    cpu: bool | None = None,
    job_class: RLHFJobClass | None = None,
) -> tuple[RLHFJob, Plan]:
    """The checked job with every default filled in, and its plan. Warnings go to stderr.

    `manifest`: a file, or the text itself. Relative paths in a text start at the working directory. The plan's times
    come from `profile_path`, or from a profile in the run directory. `planned`: the job is only planned, so its GPUs
    may be those of a cluster. `resume`: the run in the run directory is continued. `cpu`: None if the job does not run
    on this machine. True if it runs here, and on CPUs only. False if it runs here as its groups say.
    `job_class`: the class from which the job's pods get images and podTemplates.

    Raises ManifestError, UsageError and PlanError."""
    from dovetail.cli.common.plan_inputs import configurations, hardware, local_profile
    from dovetail.gpus.gpu_products import image_errors
    from dovetail.launch.local.rundir import lag_of_run, zero3_of_run
    from dovetail.manifest.checks.files import layer_counts
    from dovetail.manifest.checks.validation import warnings
    from dovetail.manifest.resolve import with_lag
    from dovetail.planner.make_plan import make_plan

    written, job, base = read_job(manifest, overrides, seed, cpu=cpu)
    if job_class is not None:
        with located(manifest, overrides):
            if errors := job_class.problems(written):
                raise ManifestError(errors)
        job = job.model_copy(update={"spec": job_class.given_to(job.spec)})
    # A run on this machine uses no image. Each process asks its own torch.
    if cpu is None and (errors := image_errors(job.spec, measured=hardware(hardware_path))):
        raise ManifestError(errors)
    configs = configurations(job.spec, base)
    folder = run_dir or Path("runs") / job.metadata.name
    measured = local_profile(profile_path, folder)
    lag, zero3 = (lag_of_run(folder), zero3_of_run(folder)) if resume else (None, None)
    with located(manifest, overrides):
        layers, gpus = layer_counts(job.spec, base), hardware(hardware_path)
        made = make_plan(job.spec, layers, configs, gpus, measured, lag, zero3)
    small = too_small(made.memory, {group.name: group.pod_template for group in job.spec.groups})
    elsewhere = planned and not all(group.on_cpu for group in written.spec.groups)
    for warning in dict.fromkeys([*warnings(written.spec, cluster=elsewhere), *made.warnings, *small]):
        click.echo(f"Warning: {warning}", err=True)
    return job.model_copy(update={"spec": with_lag(job.spec, made.lag)}), made


def read_class(manifest: Path, overrides: Sequence[str], path: Path | None) -> RLHFJobClass | None:
    """The class that a manifest names, from a file, or from the cluster. None if the manifest names none, or if kubectl
    cannot get it, which a warning says. Raises ManifestError."""
    from dovetail.tools.doctor.cluster_checks import KubectlFailed, kubectl

    name = read_job(manifest, overrides)[0].spec.job_class
    if path is None:
        if name is None:
            return None
        try:
            return parse_class(kubectl(["get", f"{CLASS_PLURAL}.{GROUP}", name]))
        except KubectlFailed as error:
            why = f"kubectl did not get class {name} ({error}), so its rules are not checked; give --class FILE"
            click.echo(f"Warning: {why}.", err=True)
            return None
    found = parse_class(read_yaml(path))
    if name != found.name:
        with located(manifest, overrides):
            given = "is missing" if name is None else f"is {name}"
            raise ManifestError(
                [f"spec.class {given}, and {path} has the class {found.name}; write class: {found.name}."]
            )
    return found


@contextmanager
def located(manifest: Path | str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Adds the manifest's file and line to sentences about fields. Sentences about fields of --set stay as they are."""
    try:
        yield
    except ValueError as error:
        from dovetail.planner.make_plan import PlanError

        if not isinstance(manifest, Path) or not isinstance(error, (ManifestError, PlanError)):
            raise
        lines = FieldLines(manifest, [override.partition("=")[0].strip() for override in overrides])
        if isinstance(error, ManifestError):
            raise ManifestError([lines.located(sentence) for sentence in error.errors]) from error
        raise PlanError(lines.located(str(error))) from error


def read_job(
    manifest: Path | str, overrides: Sequence[str], seed: int | None = None, cpu: bool | None = None
) -> tuple[RLHFJob, RLHFJob, Path]:
    """The checked job as it was written, the job with every default filled in, and the folder at which relative paths
    start. `~` in paths is the home folder. `cpu`: see `load_job`. Raises ManifestError and
    UsageError."""
    from dovetail.gpus.nvidia_driver import cuda_devices
    from dovetail.manifest.accelerators import no_gpus, on_cpus
    from dovetail.manifest.checks.files import check_files
    from dovetail.manifest.checks.rules import check
    from dovetail.manifest.resolve import absolute_paths, resolve

    document = read_yaml(manifest)
    if isinstance(document, dict):
        apply_overrides(document, [*overrides, *([f"spec.seed={seed}"] if seed is not None else [])])
    with located(manifest, overrides):
        written = parse(with_home(document))
        if cpu:
            written = written.model_copy(update={"spec": on_cpus(written.spec)})
        elif cpu is not None and (problem := no_gpus(written.spec, len(cuda_devices()))):
            raise ManifestError([f"{problem}."])
        if errors := check(written.spec):
            raise ManifestError(errors)
        base = manifest.resolve().parent if isinstance(manifest, Path) else Path.cwd()
        if errors := check_files(written.spec, base, here=cpu is not None):
            raise ManifestError(errors)
    return written, absolute_paths(written.model_copy(update={"spec": resolve(written.spec)}), base), base
