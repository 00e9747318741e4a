"""`dovetail run`: runs a job on this machine, from its manifest to its report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dovetail.cli.common.one_line_options import given, line_of, manifest_text, one_line_options
from dovetail.cli.job_arguments import load_job, seed_option, set_option
from dovetail.coordinator.reporting.report import write_report
from dovetail.coordinator.reporting.run_summary import read_summary, show
from dovetail.coordinator.reporting.sample_files import files
from dovetail.coordinator.reporting.sample_texts import facts_of, texts_of
from dovetail.coordinator.reporting.trackers.tracker_processes import missing as missing_trackers
from dovetail.launch.local.launcher import Launcher, earlier_run
from dovetail.launch.local.progress_bars import Display, make_display
from dovetail.launch.local.status_poll import StatusPoller
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.extras import needed_extras, require

INTERRUPTED = 130
# The result of a run is the first of these models that it has.
USED = ("actor", "sft")


class Follower:
    """Reads the new lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """The lines that were completed since the last call. Empty if there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def shown_sample(line: str) -> list[str] | None:
    """A sample that the coordinator shows, as lines for people. None for other events in events.jsonl."""
    if '"sample.shown"' not in line:
        return None
    try:
        event: dict[str, Any] = json.loads(line)
        title = f"iteration {event['iteration']}, {event['which']} response: {facts_of(event)}"
        return [title, *texts_of(event)]
    except (ValueError, KeyError, TypeError):
        return None


def first_record(line: str) -> list[str] | None:
    """The first record of a list of data as the model gets it, as lines for people. None for other events."""
    if '"data.first_record"' not in line:
        return None
    try:
        event: dict[str, Any] = json.loads(line)
        title = f"first record of {event['kind']}, as the model gets it:"
        return [title, *texts_of(event, ("given", "learnt") if event["learnt"] else ("given",))]
    except (ValueError, KeyError, TypeError):
        return None


def tracker_line(line: str) -> str | None:
    """The event of a tracker that does not get its rows, as one line. None if `line` is another event."""
    try:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "tracker.late":
            return f"Warning: {event['message']}; --resume of the run sends it"
        if event["event"] != "tracker.failed":
            return None
        return (
            f"Warning: the tracker {event['kind']} gets no metrics: {event['reason']} (it is tried again; its log: "
            f"logs/tracker-{event['kind']}.log)"
        )
    except (ValueError, KeyError, TypeError):
        return None


def event_line(line: str) -> str:
    """An event of events.jsonl as 'iteration.finished iteration=3 ...'."""
    try:
        event: dict[str, Any] = json.loads(line)
        name = event.pop("event")
    except (ValueError, KeyError, AttributeError):
        return line
    for noise in ("time", "process"):
        event.pop(noise, None)
    return " ".join([str(name), *(f"{key}={value}" for key, value in event.items())])


def run_job(
    job: RLHFJob,
    plan: Plan,
    run_dir: Path,
    *,
    resume: bool,
    overwrite: bool,
    verbose: bool,
    console: Console,
    hint: str,
    profile: Profile | None = None,
) -> int:
    """Run a job to its end and show its results. Returns the exit code. `hint`: the command line that resumes the run.
    `profile`: the times for the first training schedule. Raises RunError (exit code 1) if the run fails, and UsageError
    (exit code 2) if it cannot start."""
    display: Display = make_display(job.spec, console)
    launcher = Launcher(job, plan, run_dir, earlier_run(resume, overwrite), tell=display.tell)
    with launcher:
        if profile is not None:
            launcher.take_profile(profile)
        follower = Follower(launcher.run_dir / "events.jsonl")

        def on_step() -> None:
            for line in follower.lines():
                if (shown := shown_sample(line) or first_record(line)) is not None:
                    for text in shown:
                        display.tell(text)
                elif verbose:
                    display.tell(event_line(line))
                elif (shown_tracker := tracker_line(line)) is not None:
                    display.tell(shown_tracker)

        with display:
            for _, sentence in missing_trackers(job.spec.trackers):
                display.tell(f"Warning: {sentence}")
            if verbose:
                display.tell(f"processes: {', '.join(spec.name for spec in launcher.specs)}")
                display.tell(f"coordinator: {launcher.url}, logs: {launcher.run_dir / 'logs'}")
            with StatusPoller(launcher.url, launcher.token, display.update):
                outcome = launcher.run(on_step)
            on_step()  # the events of the end
            if outcome.succeeded:
                display.finish(read_summary(launcher.run_dir))
    if outcome.interrupted:
        console.print("Stopped; every process has ended. Continue with:", highlight=False)
        console.print(f"  {hint}", highlight=False, markup=False, soft_wrap=True)
        return INTERRUPTED
    if not outcome.succeeded:
        report = launcher.run_dir / "report.html"
        where = f" (report: {report})" if report.exists() else ""
        raise RunError(f"the run failed: {outcome.reason}{where}")
    report = write_report(run_dir)
    console.print()
    show(console, read_summary(run_dir))
    console.print()
    here = shlex.quote(str(run_dir))
    results = [f"Report:  {report}", f"Page:    dovetail ui {here}"]
    results += [f"Samples: dovetail samples {here}"] if files(run_dir) else []
    for line in [*results, *next_steps(run_dir)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def next_steps(run_dir: Path) -> list[str]:
    """The commands that use the run's model. Empty if the run made no language model."""
    model = next((name for name in USED if (run_dir / "models" / name / "config.json").is_file()), None)
    if model is None:
        return []
    folder = shlex.quote(str(run_dir)) + (f" --model {model}" if model != USED[0] else "")
    return [
        f"Chat:    dovetail chat {folder}",
        f"Serve:   dovetail serve {folder}",
        f"Push:    dovetail push {folder} OWNER/NAME",
    ]


@click.command()
@click.argument("manifest", metavar="[JOB.yaml]", required=False, type=click.Path(path_type=Path))
@one_line_options
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in the run directory. With --set spec.ppo.iterations=N the run is extended.",
)
@click.option("--overwrite", is_flag=True, help="Delete an earlier run in the run directory first. Other files stay.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Where the run's files go.  [default: runs/<job name>]"
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measured times, written by dovetail profile. The plan and the first schedule use them.  [default: "
    "profile.json in the run directory, if there is one]",
)
@set_option
@seed_option
@click.option("--cpu", is_flag=True, help="Run everything on CPUs, even groups that ask for GPUs.")
@click.option("-v", "--verbose", is_flag=True, help="Show the coordinator's events as they happen.")
def run(
    manifest: Path | None,
    method: str | None,
    model: str | None,
    prompts: tuple[str, ...],
    demonstrations: tuple[str, ...],
    preferences: tuple[str, ...],
    rewards: tuple[str, ...],
    print_only: bool,
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

    The command starts a coordinator, the trainers, and a vLLM server and a scorer for each rollout. A process that dies
    is started again. At the end you see a table, and the run directory has a report.html. Ctrl-C stops everything in
    seconds. --resume continues.

    The run directory holds the trained models (models/actor, models/reward, ...), summary.json, checkpoints, logs,
    TensorBoard files, and a Perfetto trace of each iteration.

    Without a manifest, --method names what to do. The manifest that this means is printed first:

    \b
      dovetail run --method grpo --model Qwen/Qwen2.5-0.5B --prompts prompts.jsonl --reward rewards:correct
    """
    if resume and overwrite:
        raise UsageError("--resume continues the earlier run and --overwrite deletes it; give one of them")
    from dovetail.cli.common.plan_inputs import local_profile

    line = line_of(method, model, demonstrations, preferences, prompts, rewards, manifest, print_only)
    # The printed manifest has the overrides already.
    text = None if line is None else manifest_text(line, overrides, seed, cpu)
    source = manifest if text is None else text
    assert source is not None
    changes = (overrides, seed) if text is None else ((), None)
    job, plan = load_job(source, *changes, profile_path=profile_path, run_dir=run_dir, resume=resume, cpu=cpu)
    if text is not None:
        click.echo(text if print_only else f"The manifest of this run (--print-only > job.yaml keeps it):\n\n{text}")
    if print_only:
        return
    require("dovetail run", needed_extras(job, plan))
    folder = run_dir or Path("runs") / job.metadata.name
    measured = local_profile(profile_path, folder)
    words = [str(manifest)] if line is None else given(vars(line))
    words += [word for override in overrides for word in ("--set", override)]
    words += ["--seed", str(seed)] if seed is not None else []
    words += ["--cpu"] if cpu else []
    words += ["--run-dir", str(run_dir)] if run_dir is not None else []
    words += ["--profile", str(profile_path)] if profile_path is not None else []
    hint = shlex.join(["dovetail", "run", *words, "--resume"])
    code = run_job(
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
