"""A run's directory: made or taken up again, locked against a second launcher, with the job's token in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.api.plan import Plan
from dovetail.api.profile import Profile
from dovetail.api.types import RLHFJob
from dovetail.local.errors import RunError, UsageError

# What may change between a run and its resumption: nothing here alters results already produced.
RESUMABLE = ("failurePolicy", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """OSErrors as RunErrors: disk full, not allowed, not a directory, ... with the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"the disk that holds {path} is full; free some space or use another --run-dir") from error
        reason = (error.strerror or str(error)).lower()
        raise RunError(f"cannot write the run directory {path}: {reason}; choose another with --run-dir") from error


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


class RunDir:
    """Holds the lock from `open` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: int | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def open(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Make the directory and lock it. Raises UsageError if an earlier run is in it and neither `resume` nor
        `overwrite` (which deletes that run first) is given, or if another launcher runs there now."""
        if not resume and not overwrite and self._used():
            raise self._earlier_run()
        if resume and not self._used():
            raise UsageError(f"there is no run to resume in {self.path}; leave out --resume to start one")
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise UsageError(
                    f"another dovetail run is using {self.path}; wait for it, or choose another --run-dir"
                ) from None
            if not resume and self._used():
                if not overwrite:
                    self.close()
                    raise self._earlier_run()
                self._empty()
            self.logs.mkdir(exist_ok=True)
            (self.path / "traces").mkdir(exist_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_job(self, job: RLHFJob, plan: Plan, *, resume: bool) -> None:
        """job.json and plan.json. On resumption the manifest must be the one of the run; raises UsageError, naming
        the first field that differs."""
        new = job.model_dump(mode="json", by_alias=True)
        path = self.path / "job.json"
        if resume:
            field = _first_difference(_comparable(_read_json(path)), _comparable(new), "")
            if field:
                raise UsageError(
                    f"cannot resume {self.path}: {field} differs from the manifest that the run was started with; "
                    "undo the change, or start a new run in another --run-dir"
                )
            (self.path / "summary.json").unlink(missing_ok=True)
        with explained(self.path):
            write_text(self.path / "plan.json", plan.model_dump_json(by_alias=True, indent=2) + "\n")
            write_text(path, json.dumps(new, indent=2) + "\n")

    def write_profile(self, profile: Profile) -> None:
        """profile.json: the times that the schedule of training begins with."""
        with explained(self.path):
            write_text(self.path / "profile.json", profile.model_dump_json(by_alias=True, indent=2) + "\n")

    def token(self) -> str:
        """The run's secret, made on first use and readable by its owner alone."""
        path = self.path / "token"
        with explained(self.path):
            if not path.exists():
                write_text(path, secrets.token_hex(32), mode=0o600)
            return path.read_text().strip()

    def _earlier_run(self) -> UsageError:
        return UsageError(
            f"{self.path} holds an earlier run; continue it with --resume, replace it with --overwrite, "
            "or choose another --run-dir"
        )

    def _used(self) -> bool:
        return (self.path / "job.json").exists() and (self.path / "plan.json").exists()

    def _empty(self) -> None:
        for entry in self.path.iterdir():
            if entry.name == ".lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    return dict(document)


def _comparable(document: dict[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in document.get("spec", {}).items() if key not in RESUMABLE}
    return {"metadata": {"name": document.get("metadata", {}).get("name")}, "spec": spec}


def _first_difference(old: Any, new: Any, path: str) -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            found = _first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    return None if old == new else path
