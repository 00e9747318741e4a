"""Finds processes that hang. The launcher, or a pod's main process, then kills them.

There are two signs. Both come from the process itself and not from its connections (docs/architecture.md, "Deadlines"):

- *Stopped*: the process, or one below it (vLLM's engine core, a worker), is in the kernel's state T, as after SIGSTOP.
- *Silent*: its pulse (`dovetail.protocol.process.pulse`) was not touched. The pulse may be late while the process uses
  the CPU or waits for a disk. Before its first beat, a process may be silent for any time as long as it does
  something."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dovetail.launch import proctree
from dovetail.launch.proctree import Process, descendants

# A process that waits for a stopped peer is idle too, until the peer has been killed. So it gets twice the time, and
# more than the 90 s that a trainer's collective waits at least.
LEAST_SILENT_SECONDS = 180.0
LEAST_BUSY_SECONDS = 1800.0
# The polling and reporting threads of an idle server need less of a core than this.
BUSY_SHARE = 0.02
LONGEST_PERIOD_SECONDS = 5.0
_PREFIX, _LOCK = "dovetail-pulse-", "lock"
# The path of a Unix socket has at most 107 bytes. This leaves room for the names of our folder and of vLLM's sockets.
_LONGEST_PARENT = 40


def temporary_folder() -> Path:
    """The system's temporary folder (TMPDIR). If its path is too long for a Unix socket in it, /tmp."""
    path = tempfile.gettempdir()
    return Path(path if len(os.fsencode(path)) <= _LONGEST_PARENT else "/tmp")


@dataclass(frozen=True)
class LivenessLimits:
    """After how many seconds a process is killed. `stopped`: the limit for a process that is stopped. `silent`: for one
    that is silent and idle. `busy`: for one that is silent and busy after its first beat. `starting`: for one that is
    idle before its first beat."""

    stopped: float
    silent: float
    busy: float
    starting: float

    @staticmethod
    def of(peer_timeout: float) -> LivenessLimits:
        """The limits that follow from `failurePolicy.peerTimeoutSeconds`."""
        long = max(10 * peer_timeout, LEAST_BUSY_SECONDS)
        return LivenessLimits(peer_timeout, max(2 * peer_timeout, LEAST_SILENT_SECONDS), long, long)


@dataclass
class _Watched:
    pid: int
    mark: int | None  # of its last beat
    below: bool
    beaten: bool = False
    stopped: float | None = None
    silent: float = 0.0
    worked: float = 0.0
    cpu: float = 0.0


class Pulses:
    """The files of the pulses, and vLLM's sockets. They are in a folder of their own in the system's temporary folder,
    because the run directory may be on a slow, shared disk. A launcher that is killed leaves its folder. The next
    `Pulses` of the same user removes it. A lock, which ends with its process, shows whose folder is still in use."""

    def __init__(self) -> None:
        parent = temporary_folder()
        _remove_abandoned(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # It is locked before it gets its name, so that no process sees a folder of ours that is not locked.
        new = self.folder / f"{_LOCK}.new"
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.folder / _LOCK)

    def path(self, name: str) -> Path:
        """Make the file of one process, and return its path."""
        path = self.folder / name
        path.touch()
        os.utime(path, (0, 0))
        return path

    def mark(self, name: str) -> int | None:
        """A number that changes with every beat. 0 before the first one. None if there is no file."""
        try:
            return os.stat(self.folder / name).st_mtime_ns
        except OSError:
            return None

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's pulses whose launcher is gone. Leaves what it cannot remove."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is in use
                shutil.rmtree(folder, ignore_errors=True)


class Liveness:
    """`begin` and `end` say which processes run. `look`, which must be called again and again, says which hang, and
    why.

    `mark(name)` changes with every beat of a process's pulse, from 0 on. It is None for a process without a pulse,
    which hangs only if it is stopped. `clock` returns monotonic seconds. At most LONGEST_PERIOD_SECONDS of the time
    between two looks count, so that no process is killed because the watcher itself was stopped."""

    def __init__(
        self,
        limits: LivenessLimits,
        mark: Callable[[str], int | None],
        clock: Callable[[], float] = time.monotonic,
        snapshot: Callable[[], Iterable[Process]] = proctree.snapshot,
    ) -> None:
        self._limits, self._mark, self._clock, self._snapshot = limits, mark, clock, snapshot
        self.period = min(LONGEST_PERIOD_SECONDS, limits.stopped / 10)
        self._watched: dict[str, _Watched] = {}
        # The marks that ended processes left. The next process of the name may beat before `begin`.
        self._left: dict[str, int | None] = {}
        self._looked = clock()

    def begin(self, name: str, pid: int, below: bool = True) -> None:
        """Watch the process `name`, which runs as `pid`. `below`: also watch the processes that it started."""
        self._watched[name] = _Watched(pid, self._left.get(name, 0), below)

    def end(self, name: str) -> None:
        """Stop watching a process that has ended, or will end soon."""
        if self._watched.pop(name, None) is not None:
            self._left[name] = self._mark(name)

    def look(self) -> dict[str, str]:
        """The processes that hang, each with a phrase that says how. Each is named once. Nothing is looked at if the
        last look was less than `period` seconds ago."""
        now = self._clock()
        elapsed = now - self._looked
        if elapsed < self.period:
            return {}
        self._looked = now
        elapsed = min(elapsed, LONGEST_PERIOD_SECONDS)
        processes = {process.pid: process for process in self._snapshot()}
        found = {}
        for name, watched in list(self._watched.items()):
            tree = {watched.pid}
            if watched.below:
                tree |= descendants(watched.pid, processes.values())
            why = self._judge(name, watched, [processes[pid] for pid in tree if pid in processes], elapsed)
            if why is not None:
                found[name] = why
                self.end(name)
        return found

    def _judge(self, name: str, watched: _Watched, tree: list[Process], elapsed: float) -> str | None:
        limits = self._limits
        stopped = [process for process in tree if process.state == "T"]
        # The seconds count from the first look that found it stopped.
        watched.stopped = None if not stopped else 0.0 if watched.stopped is None else watched.stopped + elapsed
        if watched.stopped is not None and watched.stopped >= limits.stopped:
            whose = "" if any(p.pid == watched.pid for p in stopped) else f"its process {stopped[0].pid} "
            return f"{whose}stopped for {watched.stopped:.0f} s"
        mark = self._mark(name)
        if mark is None or stopped:
            return None
        cpu = sum(process.cpu for process in tree)
        # The sum can fall, because the CPU seconds of a child that has ended are missing.
        used = max(0.0, cpu - watched.cpu)
        watched.cpu = cpu
        if mark != watched.mark:
            watched.mark, watched.beaten, watched.silent, watched.worked = mark, True, 0.0, 0.0
            return None
        watched.silent += elapsed
        watched.worked += elapsed if any(process.state == "D" for process in tree) else used
        busy = watched.worked > BUSY_SHARE * watched.silent
        if not watched.beaten:
            limit = float("inf") if busy else limits.starting
        else:
            limit = limits.busy if busy else limits.silent
        if watched.silent < limit:
            return None
        return f"silent for {watched.silent:.0f} s, {'though it used the CPU' if busy else 'doing nothing'}"
