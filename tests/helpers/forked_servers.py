"""Real vLLM servers forked from one process that has the imports, as `dovetail run` starts them on CPUs: a few seconds
each."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from dovetail.launch.processes import ProcessSpec
from dovetail.launch.spawn import Exited
from dovetail.protocol.process.env import ProcessEnv
from helpers.free_ports import free_port
from helpers.nursery import NurserySpawner
from helpers.vllm_servers import TOKEN, Server

HEALTHY_SECONDS = 1200.0


@dataclass
class ForkedServer(Server):
    """`process` is None: the spawner has it."""

    def close(self) -> None:
        raise NotImplementedError("Forks ends it")


class Forks:
    """To be used from one thread."""

    def __init__(self, folder: Path) -> None:
        self._spawner = NurserySpawner({**os.environ, "OMP_NUM_THREADS": "1"}, folder / "zygote.log")
        self._spawner.start()

    def start(self, name: str, run_dir: Path, coordinator: str = "http://127.0.0.1:9") -> Server:
        """Asks for a server of the run directory's job; `wait` for it."""
        port = free_port()
        env = ProcessEnv("test", name, run_dir, coordinator, TOKEN, "127.0.0.1", port, 0, "rollout", 0, 1)
        log = run_dir / f"{name}.log"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_PORT": str(free_port()), **env.write()}
        spec = ProcessSpec(name, "dovetail.rollout.serving.vllm_server", variables, log)
        self._spawner.spawn(spec)
        return ForkedServer(name, f"http://127.0.0.1:{port}", None, log)  # type: ignore[arg-type]

    def wait(self, servers: list[Server]) -> None:
        """Until all answer. Fails with its log when one has ended."""
        end = time.monotonic() + HEALTHY_SECONDS
        waiting = list(servers)
        while waiting:
            for event in self._spawner.poll():
                for server in waiting:
                    ended = isinstance(event, Exited) and event.name == server.name
                    assert not ended, f"{server.name} ended: {server.failure()}"
            assert time.monotonic() < end, f"not healthy: {waiting[0].failure()}"
            if _answers(waiting[0]):
                waiting.pop(0)
            else:
                time.sleep(0.05)

    def stop(self, servers: list[Server]) -> None:
        for server in servers:
            self._spawner.signal(server.name, signal.SIGKILL)

    def close(self) -> None:
        self._spawner.close()


def _answers(server: Server) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(server.url + "/health", timeout=60) as reply:
        return bool(reply.status == 200)
    return False
