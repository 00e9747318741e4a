"""Writes summary.json and report.html of a failed or interrupted run. They give the reason, whichever process found
it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dovetail.coordinator.reporting.report import write_report
from dovetail.coordinator.reporting.results import write_final_summary
from dovetail.launch.supervisor import Outcome
from dovetail.protocol.errors import RunError
from dovetail.protocol.files.durable import read_object

# With fewer free bytes no checkpoint, log or database can be written.
LEAST_BYTES = 1 << 20
LOOK_SECONDS = 5.0
RESERVE = ".reserve"
RESERVE_BYTES = 1 << 19


def full_disk(folders: Iterable[Path]) -> Path | None:
    """The first of the folders whose disk is full. None if no disk is full."""
    for folder in folders:
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
            if free < LEAST_BYTES or (disk.f_files and not disk.f_ffree):
                return folder
    return None


def reserve(run_dir: Path) -> None:
    """Reserve the space that summary.json and report.html need if the disk becomes full."""
    with contextlib.suppress(OSError):
        (run_dir / RESERVE).write_bytes(bytes(RESERVE_BYTES))


def give_back(run_dir: Path) -> None:
    """Free the reserved space, because it is needed now or no longer needed."""
    with contextlib.suppress(OSError):
        (run_dir / RESERVE).unlink()


class DiskWatch:
    """Warns when a disk of the run becomes full. Then logs lose lines, and the next checkpoint or transaction of the
    store fails. `clock` returns monotonic seconds."""

    def __init__(self, folders: Sequence[Path], tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._folders = folders
        self._tell = tell
        self._clock = clock
        self._due = clock()
        self._told: Path | None = None

    def look(self) -> None:
        """Call it often. It looks at the disks every few seconds."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + LOOK_SECONDS
        found = full_disk(self._folders)
        if found is not None and found != self._told:
            self._tell(f"Warning: the disk that holds {found} is full; free some space")
        self._told = found


def with_cause(outcome: Outcome, folders: Iterable[Path]) -> Outcome:
    """The outcome of a run. If the run failed and a disk is full, its reason becomes the full disk, because the process
    that failed may have had no space to write that."""
    if outcome.succeeded or outcome.interrupted or (folder := full_disk(folders)) is None:
        return outcome
    said = f" (last: {outcome.reason})" if outcome.reason and "is full" not in outcome.reason else ""
    text = f"the disk that holds {folder} is full; free some space, then continue with --resume{said}"
    return replace(outcome, reason=text)


def write_results(run_dir: Path, outcome: Outcome) -> None:
    """Write both files if the disk has space. A summary in which the coordinator explained its failure stays. Call it
    after the last process has ended."""
    give_back(run_dir)
    with contextlib.suppress(OSError):
        if outcome.interrupted:
            write_final_summary(run_dir, "interrupted", None)
        elif read_object(run_dir / "summary.json").get("state") != "failed":
            write_final_summary(run_dir, "failed", outcome.reason)
    with contextlib.suppress(RunError, OSError):
        write_report(run_dir)
