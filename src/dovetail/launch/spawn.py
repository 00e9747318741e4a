"""Starts, signals and watches processes through a zygote. There are two spawners with one interface."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dovetail.launch import proctree
from dovetail.launch.processes import ProcessSpec
from dovetail.protocol.process import endings
from dovetail.protocol.process.env import started_with
from dovetail.protocol.process.pulse import PULSE

PRELOAD = "dovetail.rollout.serving.preload:preload"
PRELOAD_TRAINERS = "dovetail.rollout.serving.preload:preload_trainers"  # for a job without rollouts


@dataclass(frozen=True)
class Started:
    """A process has been started."""

    name: str
    pid: int


@dataclass(frozen=True)
class Exited:
    """A process has ended, with all its descendants. `code` is negative for a signal, as in `subprocess`. `lost`: it
    died because its spawner died. This is one fault, even if many processes die."""

    name: str
    code: int
    lost: bool = False


Event = Started | Exited


class Spawner:
    """Runs processes through a zygote. It starts the zygote on first use, and replaces it when it dies.

    Use it from one thread, which must live at least until the zygote has started. `env` and `log` are the zygote's
    environment and log file. `name` is the spawner's name in messages."""

    preload: str | None = None

    def __init__(self, env: Mapping[str, str], log: Path, name: str = "spawner") -> None:
        self.name = name
        self.killed_as: str | None = None
        self._env = dict(env)
        self._log = log
        self._zygote: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._buffer = b""
        self._asked: set[str] = set()
        self._pids: dict[str, int] = {}
        self._sessions: set[int] = set()
        self._below: set[int] = set()
        self._marks: set[str] = set()
        self._log_start = 0

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the running processes, by name."""
        return dict(self._pids)

    def last_log_line(self) -> str | None:
        """The last line of the zygote's log, to report its death."""
        return endings.why_ended(self._log, self._log_start)

    @property
    def zygote_pid(self) -> int | None:
        return None if self._zygote is None else self._zygote.pid

    def start(self) -> None:
        """Start the zygote now and not at the first `spawn`, because its imports take a while."""
        if self._zygote is not None:
            return
        proctree.adopt_orphans()
        self.killed_as = None
        self._log_start = endings.size(self._log)
        ours, theirs = socket.socketpair()
        self._zygote = self._launch(theirs)
        theirs.close()
        ours.setblocking(False)
        self._channel, self._buffer = ours, b""

    def spawn(self, spec: ProcessSpec) -> None:
        """Ask for a process. `poll` returns `Started` when the zygote is ready and has started it."""
        self.start()
        self._asked.add(spec.name)
        if PULSE in spec.env:
            self._marks.add(f"{PULSE}={spec.env[PULSE]}")
        command = {"module": spec.module, "arguments": list(spec.arguments), "env": spec.env, "log": str(spec.log)}
        self._send({"op": "spawn", "name": spec.name, **command})

    def signal(self, name: str, sig: int) -> None:
        """Send a signal to a process, not to its descendants. Does nothing if it has ended."""
        if name in self._pids:
            self._send({"op": "signal", "pid": self._pids[name], "signal": int(sig)})

    def kill(self, why: str) -> None:
        """Kill a zygote that hangs, and its processes with it. `poll` then returns their ends, and `killed_as` says
        why."""
        if self._zygote is not None:
            self.killed_as = why
            # Processes below it with sessions of their own can be found only while it lives.
            self._below = proctree.descendants(self._zygote.pid, proctree.snapshot())
            self._zygote.kill()

    def fileno(self) -> int | None:
        """A file descriptor that is readable when `poll` has events. None before the zygote starts."""
        return None if self._channel is None else self._channel.fileno()

    def poll(self) -> list[Event]:
        """The events since the last call. Does not wait."""
        if self._channel is None:
            return []
        ended = False
        while not ended:
            try:
                data = self._channel.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._buffer += data
            ended = not data
        *lines, self._buffer = self._buffer.split(b"\n")
        events: list[Event] = []
        for line in lines:
            message = json.loads(line)
            if message["event"] == "started":
                self._pids[message["name"]] = message["pid"]
                self._sessions.add(message["pid"])
                events.append(Started(message["name"], message["pid"]))
            elif message["event"] == "exit":
                self._pids.pop(message["name"], None)
                self._asked.discard(message["name"])
                events.append(Exited(message["name"], message["code"]))
        if ended:
            # A spawner that was told to end does so with 0, after it has killed its processes.
            code = self._bury() or -signal.SIGKILL
            events += [Exited(name, code, lost=True) for name in sorted(self._asked)]
            self._asked.clear()
            self._pids.clear()
        return events

    def close(self, seconds: float = 8.0) -> None:
        """Kill every process at once, and wait until all have ended."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._zygote is not None:
            # At SIGTERM it kills its children first. A zygote that still imports has none, so it may die at once.
            with contextlib.suppress(ProcessLookupError):
                self._zygote.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._zygote.wait(seconds)
            self._bury()
        self._asked.clear()
        self._pids.clear()

    def _launch(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Start the zygote's process, whose end of the channel is `theirs`."""
        # -P: a module in the current folder must not replace one of ours or of a library.
        command = [sys.executable, "-P", "-m", "dovetail.launch.zygote", str(theirs.fileno()), str(os.getpid())]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, *([self.preload] if self.preload else [])],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _send(self, request: Mapping[str, object]) -> None:
        assert self._channel is not None
        data = memoryview(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + 10.0
        while data and time.monotonic() < deadline:
            try:
                data = data[self._channel.send(data) :]
            except BlockingIOError:
                time.sleep(0.01)  # a zygote reads nothing while it preloads; its socket holds about 200 KB
            except OSError:
                return  # the zygote died, and `poll` reports that

    def _bury(self) -> int:
        """Clean up after the zygote has ended: kill what it cannot kill any more. Returns its exit code."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        zygote, self._zygote = self._zygote, None
        if zygote is None:
            return -signal.SIGKILL
        try:
            code = zygote.wait(1.0)
        except subprocess.TimeoutExpired:
            zygote.kill()
            code = zygote.wait()
        # Its children die with it (PR_SET_PDEATHSIG). We have adopted their children, and find them by their sessions,
        # and by the pulse in their environment if they have sessions of their own.
        sessions, below = self._sessions | {zygote.pid}, self._below

        def left(found: list[proctree.Process]) -> set[int]:
            marked = started_with(self._marks) | below
            return {p.pid for p in found if (p.session in sessions or p.pid in marked) and not p.zombie}

        proctree.kill_until_gone(left)
        _reap(p.pid for p in proctree.snapshot() if p.session in sessions and p.parent == os.getpid() and p.zombie)
        self._sessions.clear()
        self._marks.clear()
        self._below = set()
        return code


def _reap(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class ExecSpawner(Spawner):
    """Starts `python -m <module>`. It is slow and shares nothing. Machines with GPUs need it, because CUDA does not
    survive a fork."""


class ForkSpawner(Spawner):
    """Forks from a process that has already imported torch, and vLLM unless `preload` is set to PRELOAD_TRAINERS. It is
    quick, and is used on machines without GPUs."""

    preload = PRELOAD
