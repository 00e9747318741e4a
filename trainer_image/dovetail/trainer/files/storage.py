"""Lets all ranks write a folder together. It has a temporary name until every rank has written its part."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from dovetail.protocol.files.durable import sync
from dovetail.trainer.communication.groups import Groups, PeerLost, RankFailed

T = TypeVar("T")


def write_together(
    groups: Groups, path: Path, write: Callable[[Path], T], finish: Callable[[Path, list[T]], None]
) -> None:
    """Call `write(folder)` on every rank and `finish(folder, results by rank)` on rank 0, then rename the folder to
    `path`. An old folder there is replaced. Results pass through JSON. This is a collective call.

    On any failure all ranks raise `RankFailed` with one sentence, and nothing is left behind. If only this rank has
    failed, `write` must still take part in the rest of its collectives. Raises `PeerLost`."""
    temporary = path.with_name(path.name + ".tmp")
    _together(groups, path, lambda: _fresh(temporary) if groups.rank == 0 else None)
    try:
        results = _together(groups, path, lambda: write(temporary))

        def publish() -> None:
            if groups.rank == 0:
                finish(temporary, results)
                sync(temporary)
                _replace(temporary, path)

        _together(groups, path, publish)
    except RankFailed:
        if groups.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _together(groups: Groups, path: Path, work: Callable[[], T]) -> list[T]:
    result, error = None, None
    try:
        result = work()
    except PeerLost:
        raise
    except (Exception, CheckpointException) as problem:  # CheckpointException is no subclass of Exception
        error = storage_sentence(path, problem)
    groups.all_succeed(error)
    return groups.share_json(result)


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _replace(temporary: Path, path: Path) -> None:
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(temporary, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def storage_sentence(path: Path, problem: BaseException) -> str:
    """One sentence that says why `path` could not be written."""
    for cause in causes(problem):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{path} could not be written: {os.strerror(cause.errno).lower()}; free some space there"
    if any("inline_container" in str(cause) or "PytorchStreamWriter" in str(cause) for cause in causes(problem)):
        # torch.save replaces the system's error by its own.
        free = shutil.disk_usage(path.parent).free // 2**20
        return f"{path} could not be written in full; {free} MiB are free there, make room or raise the quota"
    first = next((str(c) for c in causes(problem) if isinstance(c, OSError)), str(problem))
    lines = first.strip().splitlines()
    return f"{path} could not be written: {lines[0] if lines else type(problem).__name__}"


def causes(problem: BaseException) -> list[BaseException]:
    """The exception, the exceptions that DCP collected from the ranks, and all their causes."""
    found: list[BaseException] = []
    queue: list[BaseException | None] = [problem]
    while queue:
        current = queue.pop(0)
        if current is None or current in found:
            continue
        found.append(current)
        queue += [current.__cause__, current.__context__]
        queue += [failure[0] for failure in getattr(current, "failures", {}).values()]
    return found
