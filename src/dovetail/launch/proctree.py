"""Linux process trees: finds the descendants of a process and ends all of them. No process of a job may outlive its
launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """A process in /proc. `parent`, `session`: the ids of its parent and of its session. `state`: a letter as in `ps`.
    `cpu`: the CPU seconds of all its threads so far."""

    pid: int
    parent: int
    session: int
    state: str
    cpu: float = 0.0

    @property
    def zombie(self) -> bool:
        """Whether the process has ended and waits to be reaped."""
        return self.state in "ZX"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def adopt_orphans() -> None:
    """Make this process, and not init, the new parent of descendants whose parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name of this process in `ps -o comm` and `top` (at most 15 characters)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def snapshot() -> list[Process]:
    """All processes that /proc shows now."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The line is "pid (command) state ppid pgrp session ...". The command may contain spaces and brackets.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS
        found.append(Process(int(entry.name), int(fields[1]), int(fields[3]), fields[0], cpu))
    return found


def descendants(root: int, processes: Iterable[Process]) -> set[int]:
    """The process ids below `root`. Zombies are left out, but not their children."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: set[int] = set()
    waiting = [root]
    seen = {root}
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child.pid not in seen:
                seen.add(child.pid)
                waiting.append(child.pid)
                if not child.zombie:
                    found.add(child.pid)
    return found


def kill_until_gone(find: Callable[[list[Process]], set[int]], seconds: float = 2.0) -> bool:
    """Send SIGKILL to the processes that `find` returns, again and again. Returns True when it finds none, False when
    time is up."""
    deadline = time.monotonic() + seconds
    while True:
        alive = find(snapshot()) - {os.getpid()}
        if not alive:
            return True
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
