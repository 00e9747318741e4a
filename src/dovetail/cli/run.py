"""`dovetail run`: a job from its manifest to its report, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from dovetail.local.launcher import Launcher
from dovetail.local.progress import Display, make_display
from dovetail.local.report.report import write_report
from dovetail.local.report.summary import read_summary, show
from dovetail.local.status import StatusPoller
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.plan import Plan
from dovetail.protocol.profile import Profile
from dovetail.supervision.errors import RunError

INTERRUPTED = 130


class Follower:
    """The lines that a growing file has gained since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """Whole new lines; [] if there are none or no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


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
    """Run to the end and show it; the command's exit code. `hint`: the command line that would resume it. `profile`:
    the times that the schedule of training begins with.

    Raises RunError (exit code 1) or UsageError (2) if it cannot start."""
    display: Display = make_display(job.spec, console)
    launcher = Launcher(job, plan, run_dir, resume=resume, overwrite=overwrite, profile=profile, tell=display.tell)
    with launcher:
        follower = Follower(launcher.run_dir / "events.jsonl")

        def on_step() -> None:
            for line in follower.lines() if verbose else ():
                display.tell(event_line(line))

        with display:
            if verbose:
                display.tell(f"processes: {', '.join(spec.name for spec in launcher.specs)}")
                display.tell(f"coordinator: {launcher.url}, logs: {launcher.run_dir / 'logs'}")
            with StatusPoller(launcher.url, launcher.token, display.update):
                outcome = launcher.run(on_step)
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
    console.print(f"Report:  {report}", highlight=False, soft_wrap=True)
    console.print(f"Chat:    dovetail chat {run_dir}", highlight=False, soft_wrap=True)
    return 0
