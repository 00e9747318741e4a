"""The agents of a job: a command of the user's, which is started once for each episode, or a service of theirs, which
is asked to play it. They reach the job at one socket only, which has the routes of the episodes."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from dovetail.coordinator.data.text.chat_template import Message
from dovetail.coordinator.sessions import agent_worker
from dovetail.coordinator.sessions.agent import AgentEpisode
from dovetail.coordinator.sessions.bridge import Tools
from dovetail.coordinator.sessions.chat_routes import MODEL, ChatRoutes
from dovetail.coordinator.sessions.effects import Failed
from dovetail.coordinator.sessions.http_environment import Tries, Unanswered
from dovetail.coordinator.user_code.user_process import START_SECONDS, Gone, NoPlace, ProcessPlace
from dovetail.manifest.training_types import SessionAgent
from dovetail.protocol.http.client_session import client_session
from dovetail.protocol.http.serving import Runner

FIELD = "spec.sessions.agent.url"
# The time that a service may take to accept a connection.
CONNECT_SECONDS = 30.0
_SAID_BYTES = 4096
# A program whose pod was lost begins so often. It gets the answers that it had, as long as it asks the same.
BEGUN = 3


class CommandAgents:
    """The agents of a job (`Environment`), which ask at the `routes`. Their command is started at `place`, in
    `folder`."""

    # They have tools of their own.
    tools: Tools = ()

    def __init__(self, given: SessionAgent, folder: Path, place: ProcessPlace, routes: ChatRoutes) -> None:
        assert given.command is not None
        self._command, self._seconds = given.command, given.timeout_seconds
        self._folder, self._place, self._routes = folder, place, routes
        self._socket: str | None = None

    async def open(self) -> None:
        """Serve the routes. It may be called again. Raises ValueError with one sentence."""
        self._socket = await self._place.open("agent", self._routes.app())

    async def begin(self, episode: str, asked: Sequence[Message], fields: Mapping[str, Any]) -> AgentEpisode:
        """Start the command, which gets the whole record: it has a conversation of its own."""
        record = {**fields, "messages": list(asked)}
        return AgentEpisode(partial(self._run, record), self._seconds, self._routes.episodes)

    async def close(self) -> None:
        """Serve no more. Episodes end their own commands."""
        await self._place.close()

    async def _run(self, record: Mapping[str, Any], key: str) -> None:
        """Run the command to its end. It begins anew if its pod was lost. Raises Failed if it ends badly. When this is
        cancelled, it is killed."""
        begun = 1
        while (lost := await self._lost(record, key)) is not None:
            if begun == BEGUN:
                raise Failed(f"the agent {lost}, {BEGUN} times")
            begun += 1

    async def _lost(self, record: Mapping[str, Any], key: str) -> str | None:
        """Run the command once. How its pod was lost, as a verb phrase. None if it has ended well."""
        try:
            process = await self._place.start(agent_worker.__name__)
        except NoPlace as error:
            raise Failed(str(error)) from error
        request = {
            "command": self._command,
            "folder": str(self._folder),
            "record": record,
            "key": key,
            "socket": self._socket,
        }
        try:
            await process.ask(process.limits, START_SECONDS)
            reply = await process.ask(request, None)
        except TimeoutError:
            raise Failed(f"the agent's process did not start within {START_SECONDS:.0f} s") from None
        except Gone:
            how = (await process.how_it_ended())[0]
            if process.lost:
                return how
            raise Failed(f"the agent {how}") from None
        finally:
            await process.end()
        if "refused" in reply:
            raise Failed(f"spec.sessions.agent.command: {reply['refused']}")
        if code := reply["exit"]:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise Failed(f"the agent {how}" + f": {reply['said']}" * bool(reply["said"]))
        return None


class ServiceAgents:
    """The agents of a job (`Environment`) that a service at a URL plays. It gets, in JSON:

        POST /v1/episodes {"episode", "record", "base_url", "api_key", "model"}

    It asks at `base_url` with the key, and answers with status 200 when the episode is over. Episodes' names begin with
    `run`. The routes are served at `port`, at any if it is 0."""

    tools: Tools = ()

    def __init__(self, given: SessionAgent, run: str, port: int, routes: ChatRoutes) -> None:
        assert given.url is not None
        self._url, self._seconds = given.url.rstrip("/"), given.timeout_seconds
        self._run_name, self._port, self._routes = run, port, routes
        self._runner: Runner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._base_url = ""

    async def open(self) -> None:
        """Serve the routes at the address from which the service is reached, once that answers. It may be called again.
        Raises ValueError with one sentence."""
        if self._runner is not None:
            return
        try:
            host = await asyncio.to_thread(_address_towards, self._url)
        except OSError as error:
            raise ValueError(f"{FIELD}: {self._url} cannot be reached: {error}") from error
        if self._session is None:
            self._session = client_session(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS))
        tries = Tries(self._seconds, known=False)
        while (missing := await self._missing(self._session)) is not None:
            if not await tries.another(missing):
                raise ValueError(f"{FIELD}: {self._url} {missing}; start the service, or correct the address")
        self._runner = Runner(self._routes.app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, self._port, reuse_address=True).start()
        shown = f"[{host}]" if ":" in host else host
        self._base_url = f"http://{shown}:{self._runner.addresses[0][1]}/v1"

    async def begin(self, episode: str, asked: Sequence[Message], fields: Mapping[str, Any]) -> AgentEpisode:
        """Ask the service to play the episode, with the whole record."""
        request = {
            "episode": f"{self._run_name}-{episode}",
            "record": {**fields, "messages": list(asked)},
            "base_url": self._base_url,
            "model": MODEL,
        }
        return AgentEpisode(partial(self._run, request), self._seconds, self._routes.episodes)

    async def close(self) -> None:
        """Serve no more."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _missing(self, session: aiohttp.ClientSession) -> Unanswered | None:
        """Why nothing answers at the URL. None if it does, whatever it says to a request that asks for nothing."""
        try:
            async with session.get(f"{self._url}/v1/episodes", timeout=aiohttp.ClientTimeout(total=CONNECT_SECONDS)):
                return None
        except (aiohttp.ClientError, TimeoutError) as error:
            return _unanswered(error)

    async def _run(self, request: Mapping[str, Any], key: str) -> None:
        """Ask until the episode is over. A service that died has time to come back. It plays the episode again, and
        gets what is stored as long as it asks the same. Raises Failed. When this is cancelled, the connection ends."""
        assert self._session is not None
        where, tries = f"the agent failed: POST {self._url}/v1/episodes", Tries(self._seconds, known=True)
        while True:
            try:
                async with self._session.post(f"{self._url}/v1/episodes", json={**request, "api_key": key}) as answer:
                    said = (await answer.content.read(_SAID_BYTES)).decode(errors="replace")
                if answer.status == 200:
                    return
                raise Failed(f"{where} answered {answer.status}: {' '.join(said.split())[:200]}")
            except (aiohttp.ClientError, TimeoutError) as error:
                lost = _unanswered(error)
                if not await tries.another(lost):
                    raise Failed(f"{where} {lost}, {tries.made} times") from error


def _unanswered(error: Exception) -> Unanswered:
    """Without a connection there is no time limit but that for making one."""
    if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
        return Unanswered(f"accepts no connection ({getattr(error, 'os_error', None) or type(error).__name__})", False)
    return Unanswered(f"lost its connection ({type(error).__name__})", True)


def _address_towards(url: str) -> str:
    """This machine's address on the way to a URL. Raises OSError."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as reaching:
        reaching.connect(address)
        return str(reaching.getsockname()[0])
