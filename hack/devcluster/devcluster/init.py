"""The first process of a cluster: starts the others, starts again what dies unasked, and buries orphans.

Run as process 1 of its own PID namespace, `init.py STATE_FOLDER`. It takes one JSON object a connection at `init.sock`
and answers with one. All the kernel knows of the cluster dies with it.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESTART_SECONDS = 1.0


@dataclass
class Process:
    """A component. `wanted`: it is started again when it dies."""

    argv: list[str]
    environment: dict[str, str]
    wanted: bool = True
    pid: int | None = None
    restarts: int = -1
    status: int | None = None
    not_before: float = field(default=0.0)


class Init:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.processes: dict[str, Process] = {}

    def spawn(self, name: str, process: Process) -> None:
        log = self.state / "logs" / f"{name}.log"
        process.pid = os.fork()
        if process.pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.closerange(3, 256)
                os.execvpe(process.argv[0], process.argv, {**os.environ, **process.environment})
            except OSError as error:
                os.write(2, f"{process.argv[0]}: {error}\n".encode())
            os._exit(127)
        process.restarts += 1

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for process in self.processes.values():
                if process.pid == pid:
                    process.pid = None
                    process.status = os.waitstatus_to_exitcode(status)
                    process.not_before = time.monotonic() + RESTART_SECONDS

    def start_wanted(self) -> float | None:
        """Seconds until the next one is due, None when none is."""
        due: list[float] = []
        for name, process in self.processes.items():
            if process.wanted and process.pid is None:
                wait = process.not_before - time.monotonic()
                if wait <= 0:
                    self.spawn(name, process)
                else:
                    due.append(wait)
        return min(due, default=None)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "start":
                name = request["name"]
                if "argv" in request and (name not in self.processes or self.processes[name].pid is None):
                    self.processes[name] = Process(request["argv"], request.get("environment", {}))
                process = self.processes[name]
                process.wanted, process.not_before = True, 0.0
                self.start_wanted()
            case "signal":
                process = self.processes[request["name"]]
                process.wanted = request["wanted"]
                if process.pid is not None:
                    os.kill(process.pid, request["signal"])
            case "status":
                pass
            case other:
                return {"error": f"unknown request {other!r}"}
        return {
            "processes": {
                name: {"pid": p.pid, "wanted": p.wanted, "restarts": p.restarts, "status": p.status}
                for name, p in self.processes.items()
            }
        }

    def converse(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            try:
                request = json.loads(connection.makefile().readline())
                try:
                    reply = self.answer(request)
                except (KeyError, OSError, TypeError) as error:
                    reply = {"error": f"{type(error).__name__}: {error}"}
                connection.sendall(json.dumps(reply).encode() + b"\n")
            except (OSError, ValueError):
                pass  # a client that went away

    def run(self) -> None:
        path = self.state / "init.sock"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(16)
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        # A handler, so that the wake-up socket is written to. Process 1 ignores what it has no handler for.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ready = selectors.DefaultSelector()
        ready.register(listener, selectors.EVENT_READ)
        ready.register(wake, selectors.EVENT_READ)
        while True:
            self.reap()
            for key, _ in ready.select(self.start_wanted()):
                if key.fileobj is wake:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                else:
                    self.converse(listener.accept()[0])


if __name__ == "__main__":
    Init(Path(sys.argv[1])).run()
