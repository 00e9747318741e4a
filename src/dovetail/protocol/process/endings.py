"""How processes and tasks end: with which exit codes, with their parent, and why, as their logs say.

The local launcher and Kubernetes' Jobs act on exit codes. 0 means done. Any other code is a crash, and the process is
restarted. Python itself uses 1 for a crash."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The configuration is wrong. A restart does not help, and the job fails.
BAD_CONFIGURATION = 2
# The coordinator says that the job failed. The reason is in summary.json.
JOB_FAILED = 3
# A trainer rank was stuck in a generation that is over.
SUPERSEDED = 75

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 128 * 1024
LONGEST_LINE = 400
_EXCEPTION = re.compile(
    r"(?:^|[\s:])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b(?:: .*|$))"
)
# Such a line of vLLM only points to an earlier line, in which another process says what is wrong.
POINTER = re.compile(r"root cause", re.IGNORECASE)
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Have the kernel send `sig` to this process when its parent dies. 0 cancels this. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(sig), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({_PR_SET_PDEATHSIG}): {os.strerror(error)}")


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel all tasks, and wait until they have ended. What they raise is dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def size(path: Path) -> int:
    """The size of a file in bytes. 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, start: int = 0) -> list[str]:
    """The last lines of a log that are not empty, without control characters. `start`: the byte from which it is
    read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in (_CONTROL.sub("", raw).rstrip() for raw in text.splitlines()) if line.strip()]


def why_ended(path: Path, start: int = 0) -> str | None:
    """The line of a log that tells best why its process ended. It is the last exception of a traceback, or else the
    last line of `tail`. It is cut to LONGEST_LINE characters. None if there is no such line."""
    lines = tail(path, start)
    pointer: str | None = None
    for line in reversed(lines):
        found = _EXCEPTION.search(line)
        if found and "Warning" not in found.group(1).split(":")[0]:
            if not POINTER.search(line):
                return found.group(1)[:LONGEST_LINE]
            pointer = pointer or found.group(1)[:LONGEST_LINE]
    if pointer is not None:
        return pointer
    return lines[-1].strip()[:LONGEST_LINE] if lines else None
