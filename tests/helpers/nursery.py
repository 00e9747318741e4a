"""A process that has imported torch, vLLM and what a coordinator needs once, and from which all tests of a worker fork
their jobs' processes and their vLLM servers: each would spend ten seconds or more of CPU on the same imports."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest import mock

from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.launch import proctree, zygote
from dovetail.launch.local.launcher import spawn_kind
from dovetail.launch.spawn import PRELOAD, ForkSpawner
from dovetail.protocol.process import endings
from dovetail.protocol.process.inheritance import take_environment

TESTS = Path(__file__).parents[1]
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
READY_SECONDS = 1200.0


class Adopted:
    """A process that became this one's child when its parent ended; the part of subprocess.Popen that spawners use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        with self._lock:  # a second thread would find no child
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        end = None if seconds is None else time.monotonic() + seconds
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forkserver", seconds or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """This process's end: started when first asked, ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()
        self.refused: str | None = None  # the test that runs, if it has not the mark slow

    def start(self) -> socket.socket:
        """Once it has the imports."""
        assert self.refused is None, f"{self.refused} starts trainer ranks or vLLM servers: give it the mark slow"
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "helpers.nursery", str(theirs.fileno()), str(os.getpid())],
                env=os.environ | THREADS | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            ours.settimeout(READY_SECONDS)
            assert ours.recv(16) == b"ready", "the imports failed"
            self._channel = ours
            atexit.register(self._process.kill)
        return self._channel

    def fork(self, log: Path, env: Mapping[str, str], module: str, *arguments: str, keep: int = 0) -> Adopted:
        """`python -m module arguments` with the imports made, as a child of this process in a session of its own.

        Its last argument is the number that the descriptor `keep` has there, if one is given."""
        mine = self.start()
        proctree.adopt_orphans()
        request = json.dumps({"env": dict(env), "module": module, "arguments": arguments, "keep": keep > 0})
        with log.open("ab") as file, self._lock:
            socket.send_fds(mine, [request.encode()], [file.fileno(), keep or file.fileno()])
            return Adopted(int(mine.recv(16)))


NURSERY = Nursery()


class NurserySpawner(ForkSpawner):
    """The ForkSpawner or ExecSpawner of a launcher, whose processes do not make the imports again."""

    def _launch(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        adopted = NURSERY.fork(self._log, self._env, __name__, str(os.getpid()), keep=theirs.fileno())
        return cast("subprocess.Popen[bytes]", adopted)


@contextlib.contextmanager
def forked_jobs() -> Iterator[None]:
    """Jobs that begin meanwhile have all their processes forked from the nursery. So is the coordinator, which needs no
    torch and which `dovetail run` starts as a new interpreter. On a machine with GPUs nothing is forked."""
    if spawn_kind(os.environ, cuda_devices(os.environ)) != "fork":
        yield
        return
    NURSERY.start()
    launcher = "dovetail.launch.local.launcher"
    with (
        mock.patch(f"{launcher}.ForkSpawner", NurserySpawner),
        mock.patch(f"{launcher}.ExecSpawner", NurserySpawner),
    ):
        yield


def nothing() -> None:
    """What is left to import."""


def main(argv: list[str]) -> int:
    """The forkserver of a NurserySpawner: `python -m dovetail.launch.zygote`, with nothing left to import."""
    parent, channel = argv
    return zygote.main([channel, parent, f"{__name__}:nothing"])


def _serve(channel: socket.socket, parent: int) -> None:
    """Until the tests' process ends."""
    while os.getppid() == parent:
        text, descriptors, _, _ = socket.recv_fds(channel, 1 << 18, 2)
        if not text:
            return
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            # What its child's parent will be: the tests' process, once this one has ended.
            pid = os.fork()
            if pid == 0:
                channel.close()
                os.close(reading)
                os.close(writing)
                _become(json.loads(text), parent, *descriptors)
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        channel.send(os.read(reading, 16))
        for descriptor in (*descriptors, reading, writing):
            os.close(descriptor)


def _become(request: dict[str, Any], parent: int, log: int, kept: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        env, arguments = request["env"], list(request["arguments"])
        if request["keep"]:
            arguments.append(str(kept))
        else:
            os.close(kept)
        take_environment(os.environ, env)
        own = [path for path in env.get("PYTHONPATH", "").split(":") if path]
        sys.path[:] = [*own, *(path for path in sys.path if path != str(TESTS)), str(TESTS)]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        while os.getppid() != parent:
            time.sleep(0.001)
        sys.argv = [request["module"], *arguments]
        code = importlib.import_module(request["module"]).main(arguments) or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException:
        traceback.print_exc()
    zygote._finish(code)


# What a coordinator imports, and trainers of some jobs, beside what is preloaded for users' jobs.
IMPORTS = ("dovetail.coordinator.main", "anyio._backends._asyncio", "datasets", "numba", "tensorboard.summary")


def import_for_jobs() -> None:
    """All of IMPORTS."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    for name in IMPORTS:
        importlib.import_module(name)


def wait_without_spinning() -> None:
    """The engine core and the ranks of a vLLM server ask for messages over and over for a second after each one. Two
    cores have no room for that: they ask a thousand times a second."""
    from vllm.distributed.device_communicators import shm_broadcast

    vars(shm_broadcast)["sched_yield"] = lambda: time.sleep(0.001)


def serve(channel: socket.socket, parent: int) -> None:
    """The process that has the imports, of a tests' process `parent`."""
    endings.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not cuda_devices():
        # What is imported for CPUs would keep a GPU's trainers from compiling, and vLLM's workers for CPUs replace
        # torch.cuda.Event.
        module, _, function = PRELOAD.partition(":")
        getattr(importlib.import_module(module), function)()
        wait_without_spinning()
    import_for_jobs()
    assert threading.active_count() == 1, "a process with threads cannot be forked safely"
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the shared pages
    channel.send(b"ready")
    _serve(channel, parent)


if __name__ == "__main__":
    # Not as __main__, which a forked process may import again.
    importlib.import_module("helpers.nursery").serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
