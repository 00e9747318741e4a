"""The workers of `pytest -n`, forked from one process that has collected the tests. Alone, each would spend 15 CPU
seconds on the imports of all test files; forked, it collects in one or two.

pytest's main process calls `begin`, which starts the template: it collects, and then forks a worker for each process
that connects. execnet starts `join` in place of a Python: it hands its standard streams to the worker and waits for its
end. Where there is no template to fork from, `join` becomes the Python that execnet asked for."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The names of the tests that this process has found, and the sys.path that their files have extended.
COLLECTED: set[str] = set()
PATH: list[str] = []


def keep_path() -> None:
    """After the collection. xdist gives a worker the path of pytest's main process, and a forked one doesn't import the
    files again."""
    sys.path[:] = PATH or sys.path
    PATH[:] = sys.path


def begin(config: Any, specs: list[Any]) -> None:
    """Starts the template, and has execnet's `specs` join it."""
    folder = Path(tempfile.mkdtemp(prefix="tests-"))  # only for this user: the template runs what it is sent
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    address = os.fspath(folder / "template")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        template = subprocess.Popen(
            [
                *(sys.executable, "-P", __file__, "template", str(listening.fileno()), str(os.getpid())),
                *(*map(str, config.invocation_params.args), "-n0", "--collect-only"),
            ],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
        )
    config.add_cleanup(template.wait)
    config.add_cleanup(template.kill)  # the last is called first
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join([sys.executable, "-P", __file__, "join", address])


def join(address: str, *arguments: str) -> None:
    """A worker's place in the tree of processes. `arguments`: those of a Python, the last of them its program."""
    with socket.socket(socket.AF_UNIX) as template:
        try:
            template.connect(address)
            socket.send_fds(template, [arguments[-1].encode()], [0, 1, 2])
            forked = template.recv(1)
        except OSError:
            forked = b""
        if forked:
            os.close(0)  # so that each end sees when the other has closed them
            os.close(1)
            with contextlib.suppress(OSError):
                template.recv(1)  # nothing: the worker has ended
            return
    os.execv(sys.executable, [sys.executable, *arguments])


def collect(arguments: list[str]) -> None:
    """Silently: the workers come upon the same errors."""
    import pytest

    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    pytest.main(arguments)
    for stream, (file, own) in enumerate(zip((sys.stdout, sys.stderr), kept, strict=True), 1):
        file.flush()
        os.dup2(own, stream)
        os.close(own)


def serve(listening: socket.socket, parent: int, arguments: list[str]) -> None:
    """The template. In a forked worker it returns at the worker's end."""
    from dovetail.protocol.process import endings

    endings.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect(arguments)
    if len(os.listdir("/proc/self/task")) > 1:  # a lock that another thread holds would stay locked in a forked process
        print("The workers import the test files themselves: a module that these import has threads.", file=sys.stderr)
        return
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        joined, _ = listening.accept()
        code, streams, _, _ = socket.recv_fds(joined, 1 << 16, 3)
        if os.fork() == 0:
            listening.close()
            become(joined, code.decode(), streams)
            return
        joined.close()
        for each in streams:
            os.close(each)


def become(joined: socket.socket, code: str, streams: list[int]) -> None:
    """A worker, with the streams of its `join`: what `python -c code` does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, given in enumerate(streams):
        os.dup2(given, standard)
        os.close(given)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    joined.send(b"1")
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    if sys.argv[1] == "join":
        join(*sys.argv[2:])
    else:
        serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), sys.argv[4:])
