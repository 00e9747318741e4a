"""The zygote: a small process that starts, watches and ends a job's processes for the launcher.

    python -m dovetail.launch.zygote FD PARENT_PID [PRELOAD]

Without PRELOAD it starts its children as `python -m <module> <arguments>`. With PRELOAD ("package.module:function") it
calls this function once, and then forks children that run `<module>.main(arguments)` and share the imports. Otherwise
each process would need about 14 s of CPU to import torch and vLLM.

It speaks JSON lines on the inherited socket FD. Requests: spawn, signal. Events: ready, started, exit. When the
launcher's end of the socket closes, for whatever reason, the zygote kills all its descendants and exits. It adopts
orphans, so descendants whose parent died are among them. It has one thread only, because a process with threads cannot
be forked safely.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from dovetail.launch.compat import end_interpreter
from dovetail.launch.proctree import (
    Process,
    adopt_orphans,
    descendants,
    kill_until_gone,
    set_name,
    snapshot,
)
from dovetail.protocol.process.endings import die_with_parent
from dovetail.protocol.process.inheritance import take_environment
from dovetail.protocol.process.pulse import Pulse


def _run_module(module: str, arguments: list[str]) -> int:
    try:
        code = importlib.import_module(module).main(arguments)
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    return 0 if code is None else int(code)


def _finish(code: int) -> NoReturn:
    """Do what the interpreter does on exit, without returning through the zygote's own frames."""
    end_interpreter()
    os._exit(code & 0xFF)


def _child(request: dict[str, Any], zygote: int, fork: bool) -> NoReturn:
    """Called in the new process. Makes a session, sends the streams to the log, and runs the module."""
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != zygote:
            os._exit(1)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(sig, signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(nothing)
        os.close(log)
        module, env = request["module"], request["env"]
        if not fork:
            os.execve(sys.executable, [sys.executable, "-P", "-m", module, *request["arguments"]], env)
        set_name(request["name"])
        take_environment(os.environ, env)
        sys.argv = [module]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        code = _run_module(module, request["arguments"])
    except BaseException:
        traceback.print_exc()
        code = 1
    _finish(code)


class Zygote:
    """The event loop. The launcher's socket brings requests. SIGCHLD tells that a child has died."""

    def __init__(self, channel: socket.socket, parent: int, fork: bool) -> None:
        self._channel = channel
        self._parent = parent
        self._fork = fork
        self._children: dict[int, str] = {}
        self._own: set[int] = set()
        self._pending = b""
        self._stopping = False

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._wake = (wake_read, wake_write)
        self._own = descendants(os.getpid(), snapshot())  # helper processes of the preloaded libraries
        self._send({"event": "ready"})
        pulse = Pulse.read()
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while not self._stopping and os.getppid() == self._parent:
                for key, _ in selector.select(timeout=1.0):
                    if key.fd == wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                    else:
                        self._receive()
                self._reap()
                pulse.beat()
        kill_until_gone(lambda processes: descendants(os.getpid(), processes), seconds=5.0)

    def _on_term(self, *_: object) -> None:
        self._stopping = True

    def _send(self, event: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            self._stopping = True

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._stopping = True
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "spawn":
                self._spawn(request)
            elif request["op"] == "signal" and request["pid"] in self._children:
                # Children are reaped only by this thread, so the id cannot belong to another process yet.
                os.kill(request["pid"], request["signal"])

    def _spawn(self, request: dict[str, Any]) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._selector.close()
            self._channel.close()
            for fd in self._wake:
                os.close(fd)
            _child(request, zygote, self._fork)
        self._children[pid] = request["name"]
        self._send({"event": "started", "name": request["name"], "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._children.pop(pid, None)
            if name is None:
                self._own.discard(pid)
                continue
            self._end_leftovers(pid)
            code = os.waitstatus_to_exitcode(status)
            self._send({"event": "exit", "name": name, "pid": pid, "code": code})

    def _end_leftovers(self, session: int) -> None:
        """Kill the processes that a dead child left: its session, and orphans that made sessions of their own."""
        live = set(self._children)
        me = os.getpid()

        def leftovers(processes: list[Process]) -> set[int]:
            orphans = {p.pid for p in processes if p.parent == me and not p.zombie}
            orphans -= live | self._own | {p.pid for p in processes if p.session in live}
            below = {pid for orphan in orphans for pid in descendants(orphan, processes)}
            return orphans | below | {p.pid for p in processes if p.session == session and not p.zombie}

        kill_until_gone(leftovers)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    descriptor, parent = int(arguments[0]), int(arguments[1])
    preload = arguments[2] if len(arguments) > 2 else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    if preload is not None:
        die_with_parent()  # a preload cannot notice a closed socket, and there are no children to end
        if os.getppid() != parent:
            return 1
        module, _, function = preload.partition(":")
        gc.disable()  # what imports make stays, so to look for garbage again and again is a quarter of their time
        getattr(importlib.import_module(module), function)()
        gc.freeze()  # the collector would touch the shared pages, and so copy them
        gc.enable()
        die_with_parent(0)
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            print(f"warning: {preload} left {threads - 1} threads running; forking may be unsafe", file=sys.stderr)
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    Zygote(channel, parent, fork=preload is not None).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
