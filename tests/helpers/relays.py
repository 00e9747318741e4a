"""The relays of sandboxes' pods, as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from aiohttp import web

from dovetail.coordinator.user_code import pod_relay
from dovetail.coordinator.user_code.sandbox_pods import SandboxPods
from dovetail.protocol.process import env
from dovetail.protocol.process.env import sandbox_token

TOKEN = "the job's token"


class Relays(SandboxPods):
    """The pods of a job, which come when its routes are served."""

    def __init__(self, pods: int = 1) -> None:
        super().__init__(sandbox_token(TOKEN), "127.0.0.1", 0)
        self.pods = pods
        self.processes: list[subprocess.Popen[bytes]] = []

    async def open(self, whose: str, app: web.Application | None = None) -> None:
        await super().open(whose, app)
        for _ in range(self.pods - len(self.processes)):
            self.add()

    def add(self) -> None:
        """A new pod."""
        given = {env.COORDINATOR: self.address, env.TOKEN: sandbox_token(TOKEN), env.NAME: f"pod-{len(self.processes)}"}
        command = [sys.executable, "-P", "-m", pod_relay.__name__]
        self.processes.append(subprocess.Popen(command, env={**os.environ, **given}, start_new_session=True))

    def kill(self, number: int) -> None:
        """With a pod's first process, which sees none of it, end all others."""
        for pid in [self.processes[number].pid, *self.below(number)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[number].wait()

    def below(self, number: int) -> list[int]:
        """The processes of a pod that has a relay."""
        tasks = Path(f"/proc/{self.processes[number].pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    async def close(self) -> None:
        await super().close()
        for process in self.processes:
            process.terminate()
            process.wait()
