"""Lists the runs in a folder, and says whether they are running."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from dovetail.coordinator.reporting.page.page_documents import PageDocuments
from dovetail.coordinator.reporting.page.run_folder import RunFolder

# A run directory has one of these.
SIGNS = ("job.json", "history.jsonl")


def at_work(run_dir: Path) -> bool | None:
    """Whether a coordinator holds the lock of the run's store. None if that cannot be known. Takes no lock itself."""
    try:
        file = os.open(run_dir / "store.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # The fields of struct flock are type, whence, start, length and pid.
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)
    except (OSError, struct.error):
        return None
    finally:
        os.close(file)


def begins(run_dir: Path) -> bool:
    """Whether the launcher has written the run's files, but its coordinator has not opened the store yet."""
    return not (run_dir / "store.lock").exists() and not (run_dir / "summary.json").exists()


class RunList:
    """The runs below `folder`, or the one run that `folder` is. Runs that appear later are found too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._known: dict[str, PageDocuments] = {}

    def runs(self) -> dict[str, PageDocuments]:
        """The runs by the name of their folder."""
        found = {}
        for path in self._folders():
            if path.name not in self._known:
                self._known[path.name] = PageDocuments(RunFolder(path))
            found[path.name] = self._known[path.name]
        return found

    def get(self, name: str) -> PageDocuments | None:
        """The run with this name, if there is one. The name is only compared. It never becomes part of a path."""
        return self.runs().get(name)

    def alive(self, run: PageDocuments) -> bool | None:
        path = run.folder.path
        return None if begins(path) else at_work(path)

    def _folders(self) -> list[Path]:
        if _is_run(self.folder):
            return [self.folder]
        try:
            return sorted(path for path in self.folder.iterdir() if path.is_dir() and _is_run(path))
        except OSError:
            return []


def _is_run(path: Path) -> bool:
    """Whether a folder is a run. False for a folder that this user may not read, where Path.is_file would raise
    PermissionError."""
    return any(os.path.isfile(path / name) for name in SIGNS)
