"""Draws samples on vLLM servers. Each server has one connection, over which all its samples are asked for and come back
(`dovetail.protocol.sample_stream`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from dovetail.coordinator.samples.in_flight import GenerationSettings, Work
from dovetail.coordinator.store.experts import checked_rows
from dovetail.coordinator.workers.fleet import Instance
from dovetail.manifest.training_types import Generation
from dovetail.protocol.http.client_session import client_session, note_resent
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.sample_stream import (
    FAILED,
    MOST_BYTES,
    PART,
    REFUSED,
    ROUTE,
    FrameError,
    Row,
    pack_aborts,
    pack_requests,
    unpack_rows,
)
from dovetail.protocol.sampling import sampling_params

# With these statuses the connection itself is wrong, so no server will accept it.
REFUSALS = frozenset({400, 401, 403, 404, 413, 422})

# A server takes messages of up to 16 MiB.
MOST_REQUESTS = 1024
CUT = "its stream of samples ended before the response was complete"

# It is called with the new token ids and their log-probabilities. The last call also has the finish reason, and the
# experts of the tokens if the server sends them.
OnTokens = Callable[["array[int]", "array[float]", str | None, bytes | None], None]


class ServerFailure(Exception):
    """This server did not finish the request. Another one may."""


class RequestRefused(Exception):
    """The server reports that the request itself is wrong."""


class _Draw:
    """A request whose answer is awaited, with its fields as JSON and its token ids."""

    def __init__(self, fields: bytes, tokens: Sequence[int], on_tokens: OnTokens) -> None:
        self.fields, self.tokens, self.on_tokens = fields, tokens, on_tokens
        self.sent = self.answered = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Connection:
    """The connection to one process of a server. It opens when it is made. It tells `log` which requests the server was
    asked to end."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        settings: GenerationSettings,
        log: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self._session, self._url, self._settings, self._log = session, url, settings, log
        self._draws: dict[int, _Draw] = {}
        self._next = 0
        self._unsent: list[int] = []
        self._aborts: list[str] = []
        self._seconds, self._paced = 0.0, True
        self._wake = asyncio.Event()
        self._answered = False
        self.task = asyncio.create_task(self._run())
        # This is called even if the task is cancelled before it begins.
        self.task.add_done_callback(self._end)

    @property
    def over(self) -> bool:
        """Whether the connection has ended."""
        return self.task.done()

    async def draw(self, request: dict[str, Any], on_tokens: OnTokens) -> None:
        """Ask for a sample, and pass its tokens on as they arrive. Returns after the tokens with a finish reason.
        Raises ServerFailure, RequestRefused, and _Unseen."""
        number, self._next = self._next, self._next + 1
        fields = {key: value for key, value in request.items() if key != "token_ids"} | {"number": number}
        draw = self._draws[number] = _Draw(json.dumps(fields).encode(), request["token_ids"], on_tokens)
        self._unsent.append(number)
        self._wake.set()
        try:
            await draw.done
        finally:
            # Rows that still come are for nobody.
            del self._draws[number]
            if draw.sent and draw.done.cancelled():
                self.abort([request["request_id"]])

    def abort(self, ids: Sequence[str]) -> None:
        """Ask the server to end requests. Their last rows then have the reason `abort`."""
        self._aborts += ids
        self._wake.set()

    def pace(self, seconds: float) -> None:
        """Set the time between two frames of the server. At first it is 0."""
        self._seconds, self._paced = seconds, False
        self._wake.set()

    async def _run(self) -> Exception:
        """Returns why the connection ended."""
        try:
            await self._serve()
        except (RequestRefused, ServerFailure) as found:
            return found
        except aiohttp.WSServerHandshakeError as found:
            kind = RequestRefused if found.status in REFUSALS else _Ended
            return kind(f"status {found.status} for its stream of samples")
        except (FrameError, aiohttp.WebSocketError) as found:
            return ServerFailure(f"a frame of its stream cannot be read: {found}")
        except (aiohttp.ClientError, OSError, TimeoutError) as found:
            return _Ended(f"{type(found).__name__}: {found}".rstrip(": "))
        except Exception as found:
            return ServerFailure(f"its stream of samples failed: {type(found).__name__}: {found}".rstrip(": "))
        return _Ended(CUT)

    def _end(self, task: asyncio.Task[Exception]) -> None:
        error = ServerFailure(CUT) if task.cancelled() else task.result()
        for draw in self._draws.values():
            # The server may have closed a connection that it took for idle. That is no failure.
            draw.fail(_Unseen() if isinstance(error, _Ended) and self._answered and not draw.answered else error)
        if self._aborts:
            self._log("requests.abort_lost", requests=len(self._aborts))

    async def _serve(self) -> None:
        # A frozen server completes the connection, but not the handshake. Its samples leave before this time is over.
        async with asyncio.timeout(self._settings.connect + 2 * self._settings.stall):
            connected = await self._session.ws_connect(
                self._url + ROUTE, max_msg_size=MOST_BYTES, heartbeat=2 * self._settings.stall
            )
        async with connected as socket:
            tasks = [asyncio.create_task(self._receive(socket)), asyncio.create_task(self._send(socket))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                await cancel(tasks)

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            message = await socket.receive()
            match message.type:
                case aiohttp.WSMsgType.BINARY:
                    self._take(unpack_rows(message.data))
                case aiohttp.WSMsgType.ERROR:
                    # For example, the server did not answer a ping.
                    raise socket.exception() or message.data
                case aiohttp.WSMsgType.CLOSE if message.data == aiohttp.WSCloseCode.PROTOCOL_ERROR:
                    raise RequestRefused(
                        f"it cannot read a message of the coordinator: {message.extra or 'it does not say why'}; use "
                        "rollout and coordinator images of one release"
                    )
                case aiohttp.WSMsgType.CLOSE if message.extra:
                    raise _Ended(f"it closed its stream of samples: {message.extra}")
                case aiohttp.WSMsgType.CLOSE | aiohttp.WSMsgType.CLOSING | aiohttp.WSMsgType.CLOSED:
                    return
                case _:
                    raise FrameError(f"a message of type {message.type.name}: {message.data!r}"[:200])

    async def _send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (part := self._part()) or not self._paced:
                self._paced = True
                await socket.send_bytes(pack_requests(part, self._seconds))
            if count := len(self._aborts):
                await socket.send_bytes(pack_aborts(self._aborts[:count]))
                del self._aborts[:count]
                self._log("requests.aborted", requests=count)

    def _part(self) -> list[tuple[bytes, Sequence[int]]]:
        """The next requests to send, as many as fit in a message."""
        part: list[tuple[bytes, Sequence[int]]] = []
        taken = size = 0
        for number in self._unsent:
            if size > PART or len(part) == MOST_REQUESTS:
                break
            taken += 1
            draw = self._draws.get(number)
            if draw is not None:
                draw.sent = True
                part.append((draw.fields, draw.tokens))
                size += len(draw.fields) + 4 * len(draw.tokens)
        del self._unsent[:taken]
        return part

    def _take(self, rows: Sequence[Row]) -> None:
        self._answered = True
        for row in rows:
            draw = self._draws.get(row.number)
            if draw is None or draw.done.done():
                continue
            draw.answered = True
            if row.reason == REFUSED:
                draw.fail(RequestRefused(row.extra.decode(errors="replace")))
            elif row.reason == FAILED:
                draw.fail(ServerFailure(row.extra.decode(errors="replace")))
            elif not np.isfinite(row.logprobs).all():
                draw.fail(ServerFailure("its model puts out log-probabilities that are not numbers"))
            else:
                try:
                    experts = checked_rows(row.extra) if row.extra else None
                except ValueError as error:
                    draw.fail(ServerFailure(f"the experts of its tokens cannot be read: {error}"))
                    continue
                draw.on_tokens(row.tokens, row.logprobs, row.reason, experts)
                if row.reason is not None:
                    draw.done.set_result(None)


class _Ended(ServerFailure):
    """The connection ended, and nothing was wrong with its messages."""


class _Unseen(Exception):
    """A kept connection ended before the request was answered. The server may just have closed it."""


def body(work: Work, generation: Generation, instance: Instance, left: int, replay: bool = False) -> dict[str, Any]:
    """A request for `left` more tokens after the prompt and the tokens so far, with the weights that the instance
    holds. With `replay`, the server must report which experts each token used."""
    sampler = instance.abilities.get("sampler", "counter")
    params = sampling_params(generation, work.seed, left, sampler, generated=len(work.tokens))
    params["stream_interval"] = work.interval
    if replay:
        params["routed_experts_prompt_start"] = work.experts_from
    return {
        "request_id": work.request_id,
        "token_ids": work.prompt + work.tokens,
        "sampling_params": params,
        "weights": instance.weight_version,
    }


class Requests:
    """The connections to all servers. They are opened on first use. Call `close` at the end."""

    def __init__(self, token: str, settings: GenerationSettings, log: Callable[..., None]) -> None:
        self._token = token
        self._settings = settings
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        # By the server's name: its address and incarnation, and the connection to it.
        self._connections: dict[str, tuple[tuple[str, str], Connection]] = {}
        # Processes of servers that have another process by now.
        self._gone: set[tuple[str, str, str]] = set()
        # The number of samples that are drawn, and the time between frames for about so many.
        self._live, self._seconds = 0, 0.0

    @property
    def session(self) -> aiohttp.ClientSession:
        """It sends the job's token."""
        if self._session is None:
            self._session = client_session(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect),
                headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            )
        return self._session

    async def draw(self, instance: Instance, request: dict[str, Any], on_tokens: OnTokens) -> None:
        """As `Connection.draw`. A request that was not answered on a kept connection is sent again on a new one."""
        self._count(1)
        try:
            while True:
                try:
                    await self._connection(instance).draw(request, on_tokens)
                    return
                except _Unseen:
                    note_resent()
        finally:
            self._count(-1)

    def abort(self, instance: Instance, ids: Sequence[str]) -> None:
        """Ask a server to end requests. This does not wait, because the rows show the end."""
        with contextlib.suppress(ServerFailure):
            self._connection(instance).abort(ids)

    def _count(self, more: int) -> None:
        """Servers send frames the less often, the more samples are drawn. They learn it when it doubles or halves."""
        self._live += more
        seconds = self._settings.frame(self._live)
        if self._live and seconds and not self._seconds / 2 < seconds < self._seconds * 2:
            self._seconds = seconds
            for _, connection in self._connections.values():
                connection.pace(seconds)

    def _connection(self, instance: Instance) -> Connection:
        """The connection to this process of a server. It replaces that to an earlier process. Raises ServerFailure if
        the server has a later process."""
        process = instance.url, instance.incarnation
        if (instance.name, *process) in self._gone:
            raise ServerFailure("its process is gone")
        found = self._connections.get(instance.name)
        if found is not None and found[0] != process:
            self._gone.add((instance.name, *found[0]))
            found[1].task.cancel()
        if found is None or found[0] != process or found[1].over:
            connection = Connection(
                self.session, instance.url, self._settings, partial(self._log, instance=instance.name)
            )
            connection.pace(self._seconds)
            found = self._connections[instance.name] = process, connection
        return found[1]

    async def close(self) -> None:
        """Close all connections. It may be called again."""
        connections, self._connections = self._connections, {}
        await cancel([connection.task for _, connection in connections.values()])
        if self._session is not None:
            await self._session.close()
            self._session = None
