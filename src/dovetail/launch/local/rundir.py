"""The directory of a run. It is created for a new run, or opened to resume one. It is locked against a second launcher,
and it holds the job's token."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.identity import (
    RESULTS,
    delete_run,
    has_store,
    is_being_deleted,
    names_taken,
    new_id,
    run_of,
    write_id,
)
from dovetail.coordinator.store.manifest_changes import SPEC, ChangeError, check, ranks_text, remember
from dovetail.coordinator.store.store import open_records
from dovetail.manifest.checks.changes import changes
from dovetail.manifest.types import RLHFJob, Stage
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.files.durable import read_object, write_json, write_whole
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.env import token_problem


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn OSErrors, such as a full disk or a missing permission, into RunErrors that name the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"the disk that holds {path} is full; free some space or use another --run-dir") from error
        reason = (error.strerror or str(error)).lower()
        raise RunError(f"cannot write the run directory {path}: {reason}; choose another with --run-dir") from error


class RunDir:
    """The run directory. It is locked from `open` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: int | None = None
        self._folder: int | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def open(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Make the directory and lock it. `overwrite` first deletes what an earlier run has made in it. Raises
        UsageError if there is an earlier run and neither `resume` nor `overwrite` is given, if the run to resume lacks
        what it needs, if files are in the way that no run has made, or if another launcher runs there now."""
        self._check(resume, overwrite)
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise UsageError(
                    f"another dovetail run is using {self.path}; wait for it, or choose another --run-dir"
                ) from None
            try:
                earlier = self._check(resume, overwrite)
                if overwrite and earlier is not None:
                    delete_run(self.path, earlier)
            except StoreError as error:
                self.close()
                raise UsageError(f"{error}, or choose another --run-dir") from error
            except UsageError:
                self.close()
                raise
            self.logs.mkdir(exist_ok=True)
            (self.path / "traces").mkdir(exist_ok=True)

    def close(self) -> None:
        for file in (self._lock, self._folder):
            if file is not None:
                os.close(file)
        self._lock = self._folder = None

    def place(self) -> Path:
        """Where the directory is now. It is another path than `path` if somebody has moved or deleted it since
        `open`."""
        if self._folder is None:
            return self.path
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._folder))
        except OSError as error:
            same = not isinstance(error, FileNotFoundError | NotADirectoryError)
        return self.path if same else Path(os.readlink(f"/proc/self/fd/{self._folder}"))

    def write_job(self, job: RLHFJob, plan: Plan, *, resume: bool) -> str | None:
        """Write run.json, job.json and plan.json. With `resume` the manifest must be the run's, except for fields that
        may change (`dovetail.manifest.checks.changes`). Files that are lost are written again. Returns sentences if
        the run goes on with other trainer ranks, or without what this release no longer has. Raises UsageError, which
        names the first field that differs although it may not."""
        new = job.model_dump(mode="json", by_alias=True)
        path, told = self.path / "job.json", None
        if resume:
            old = _read_json(path) if path.exists() else None
            self._check_same(job, old)
            (self.path / "summary.json").unlink(missing_ok=True)
            with contextlib.suppress(ValueError):
                before = Plan.model_validate(read_object(self.path / "plan.json"), extra="ignore")
                if ranks_text(before) != ranks_text(plan):
                    told = (
                        f"The run goes on with the trainer ranks {ranks_text(plan)}, after {ranks_text(before)}. From "
                        "its last checkpoint on, weights differ by rounding from those of the earlier ranks."
                    )
            if old is not None and old.get("spec", {}).get("ppo", {}).get("streaming") == "Auto":
                gone = (
                    "The run goes on without spec.ppo.streaming, which is no longer there. From its last checkpoint "
                    "on, weights differ by rounding from those that it would have had. A new run gains more with "
                    "spec.ppo.lag."
                )
                told = f"{told} {gone}" if told else gone
        with explained(self.path):
            if not resume:
                write_id(self.path, new_id())
            write_whole(self.path / "plan.json", plan.model_dump_json(by_alias=True, indent=2).encode() + b"\n")
            write_json(path, new)
        return told

    def write_profile(self, profile: Profile) -> None:
        """Write profile.json: the measured times for the first schedule of training."""
        with explained(self.path):
            write_json(self.path / "profile.json", profile.model_dump(mode="json", by_alias=True))

    def token(self) -> str:
        """The run's secret token. It is made on first use, and only the user can read its file. Raises UsageError if
        the file holds no token."""
        path = self.path / "token"
        with explained(self.path):
            if not path.exists():
                write_whole(path, secrets.token_hex(32).encode(), mode=0o600)
            token = path.read_text(errors="replace").strip()
        if problem := token_problem(token):
            raise UsageError(f"the run's token file, {path}, {problem}; delete it and give --resume: a new one is made")
        return token

    def _check_same(self, job: RLHFJob, old: dict[str, Any] | None) -> None:
        """Compare the manifest with job.json and with the one in the store. Raises UsageError if a field differs that
        may not, and RunError if the store cannot be read."""
        try:
            if old is not None and old.get("metadata", {}).get("name") != job.metadata.name:
                raise ChangeError(
                    f"metadata.name is {job.metadata.name}, but the run is of {old.get('metadata', {}).get('name')}; "
                    "undo the change, or start a new run in another --run-dir"
                )
            for change in changes(old.get("spec", {}), job.spec) if old is not None else ():
                if not change.allowed:
                    raise ChangeError(change.sentence)
            if has_store(self.path):
                records = open_records(self.path)
                try:
                    if old is not None:
                        remember(old["spec"], records)
                    check(job.spec, records)
                finally:
                    records.close()
        except ChangeError as error:
            raise UsageError(f"cannot resume {self.path}: {error}") from error
        except StoreError as error:
            raise RunError(str(error)) from error

    def _check(self, resume: bool, overwrite: bool) -> str | None:
        """The id of the run in the directory, or None. Raises UsageError unless the run may begin, continue or be
        replaced, as the user asked."""
        try:
            run = run_of(self.path)
        except StoreError as error:
            raise UsageError(str(error)) from error
        folders = ((name, self.path / name) for name in RESULTS)
        results = [f"{name}/" for name, folder in folders if folder.is_dir() and any(folder.iterdir())]
        if run is None:
            if taken := names_taken(self.path):
                raise UsageError(
                    f"{self.path} has {', '.join(taken)}, which a run would write and which is of no run with a "
                    "run.json or store.sqlite; move them away, or choose another --run-dir"
                )
            if resume:
                raise UsageError(f"there is no run to resume in {self.path}; leave out --resume to start one")
        elif overwrite:
            pass
        elif is_being_deleted(self.path):
            raise UsageError(
                f"there is no run to resume in {self.path}: an --overwrite was deleting it when it was stopped; give "
                "--overwrite to delete the rest, or choose another --run-dir"
            )
        elif results and not has_store(self.path):
            # Without the store a run would start from zero among the files of the old one.
            raise UsageError(
                f"{self.path} has {' and '.join(results)} of an earlier run, but its store.sqlite is missing or "
                "empty; put that file back and --resume, or delete the run's files with --overwrite, or choose "
                "another --run-dir"
            )
        elif not resume:
            raise UsageError(
                f"{self.path} holds an earlier run; continue it with --resume, replace it with --overwrite (other "
                "files stay), or choose another --run-dir"
            )
        return run


def lag_of_run(run_dir: Path) -> int | None:
    """The lag (`ppo.lag`) of the run in a folder. It is read from job.json, or from the store if that is lost. None if
    there is no run or neither can be read. Other code reports these errors."""
    with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
        path = run_dir / "job.json"
        if path.exists():
            spec = read_object(path)["spec"]
        elif has_store(run_dir):
            records = open_records(run_dir)
            try:
                spec = records.get(SPEC)
            finally:
                records.close()
        else:
            return None
        return int(spec.get("ppo", {}).get("lag", 0))
    return None


def zero3_of_run(run_dir: Path) -> bool | None:
    """Whether PPO's models train with ZeRO-3 in the run in a folder. It is read from plan.json. None if there is no run
    with PPO, or if the plan cannot be read."""
    with contextlib.suppress(KeyError, TypeError):
        rows = read_object(run_dir / "plan.json")["batching"]
        found = [bool(row.get("zero3")) for row in rows if row["stage"] == Stage.PPO.value]
        return any(found) if found else None
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    return dict(document)
