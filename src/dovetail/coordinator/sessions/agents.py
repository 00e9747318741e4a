"""The agents of a job: a command of the user's, which is started once for each episode. It reaches the job at one
socket only, which has the routes of the episodes."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from dovetail.coordinator.sessions import agent_worker
from dovetail.coordinator.sessions.agent import AgentEpisode
from dovetail.coordinator.sessions.bridge import Tools
from dovetail.coordinator.sessions.chat_routes import ChatRoutes
from dovetail.coordinator.sessions.effects import Failed
from dovetail.coordinator.user_code.sandbox import Sandbox
from dovetail.coordinator.user_code.user_process import START_SECONDS, Gone, UserProcess
from dovetail.manifest.training_types import SessionAgent
from dovetail.protocol.http.serving import Runner


class Agents:
    """The agents of a job (`Environment`), which ask at the `routes`. Their command is started in `folder`. Without
    `sandbox` it may do what the job may."""

    # They have tools of their own.
    tools: Tools = ()

    def __init__(self, given: SessionAgent, folder: Path, sandbox: Sandbox | None, routes: ChatRoutes) -> None:
        self._given, self._folder, self._sandbox, self._routes = given, folder, sandbox, routes
        self._runner: Runner | None = None
        self._socket = Path()

    async def open(self) -> None:
        """Serve the routes. It may be called again. Raises ValueError with one sentence."""
        if self._runner is not None:
            return
        if self._sandbox is not None:
            await self._sandbox.check("agent")
        # The path of a Unix socket has at most 107 bytes, so it is not in the run's folder. Its routes ask for a key.
        folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
        folder.chmod(0o711)
        self._socket = folder / "routes"
        if self._sandbox is not None:
            self._sandbox = replace(self._sandbox, also=[folder])
        self._runner = Runner(self._routes.app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, self._socket).start()
        self._socket.chmod(0o666)

    async def begin(self, episode: str, record: Mapping[str, Any]) -> AgentEpisode:
        """Start the command, with a record of the prompts."""
        return AgentEpisode(partial(self._run, record), self._given.timeout_seconds, self._routes.episodes)

    async def close(self) -> None:
        """Serve no more. Episodes end their own commands."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    async def _run(self, record: Mapping[str, Any], key: str) -> None:
        """Run the command to its end. Raises Failed if it ends badly. When this is cancelled, it is killed."""
        process = await UserProcess.start(agent_worker.__name__, self._sandbox)
        request = {
            "command": self._given.command,
            "folder": str(self._folder),
            "record": dict(record),
            "key": key,
            "socket": str(self._socket),
        }
        try:
            await process.ask({"limited": self._sandbox is not None}, START_SECONDS)
            reply = await process.ask(request, None)
        except TimeoutError:
            raise Failed(f"the agent's process did not start within {START_SECONDS:.0f} s") from None
        except Gone:
            raise Failed(f"the agent {(await process.how_it_ended())[0]}") from None
        finally:
            await process.end()
        if "refused" in reply:
            raise Failed(f"spec.sessions.agent.command: {reply['refused']}")
        if code := reply["exit"]:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise Failed(f"the agent {how}" + f": {reply['said']}" * bool(reply["said"]))
