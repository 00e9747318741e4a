"""What a run leaves that did not succeed: summary.json and report.html with the cause, whoever found it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dovetail.coordinator.results import leave
from dovetail.local.errors import RunError
from dovetail.local.report import write_report
from dovetail.local.supervisor import Outcome

# With less than this no checkpoint, no log and no database goes on.
LEAST_BYTES = 1 << 20


def full_disk(folders: Iterable[Path]) -> Path | None:
    """The first of the folders whose disk has no room left."""
    for folder in folders:
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
            if free < LEAST_BYTES or (disk.f_files and not disk.f_ffree):
                return folder
    return None


def with_cause(outcome: Outcome, folders: Iterable[Path]) -> Outcome:
    """A failure on a full disk, as one sentence: who failed may have found no room to say why."""
    if outcome.succeeded or outcome.interrupted or (folder := full_disk(folders)) is None:
        return outcome
    said = f" (last: {outcome.reason})" if outcome.reason else ""
    text = f"the disk that holds {folder} is full; free some space, then continue with --resume{said}"
    return replace(outcome, reason=text)


def leave_behind(run_dir: Path, outcome: Outcome) -> None:
    """Write both files, as far as the disk lets; what the coordinator wrote of its failure stays. For after the last
    process has ended."""
    with contextlib.suppress(OSError):
        if outcome.interrupted:
            leave(run_dir, "interrupted", None)
        elif _state(run_dir) != "failed":
            leave(run_dir, "failed", outcome.reason)
    with contextlib.suppress(RunError, OSError):
        write_report(run_dir)


def _state(run_dir: Path) -> object:
    try:
        return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
