"""What the HTTP servers share: the start, the check of the job's token, time limits for requests, /healthz and
/metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dovetail.protocol.http.header_deadline import HEADER_SECONDS, SERVER_KEEP_SECONDS

BODY_SECONDS = 60.0
# Connections that have brought a request. Later requests on them have SERVER_KEEP_SECONDS.
_ASKED: web.AppKey[set[object]] = web.AppKey("asked", set)
# Every server of a job answers these paths without the job's token.
OPEN_PATHS = frozenset({"/metrics", "/healthz"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def authorized(header: str | None, token: str) -> bool:
    """Whether an Authorization header has the job's token. The header may be any text, in any encoding."""
    given = (header or "").encode(errors="surrogateescape")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


async def admit(request: web.Request, token: str) -> None:
    """Check the job's token, except on OPEN_PATHS, and read the request's body. Raises HTTPUnauthorized, and
    HTTPRequestTimeout if the body does not come within BODY_SECONDS."""
    if request.path in OPEN_PATHS:
        return
    if not authorized(request.headers.get("Authorization"), token):
        raise web.HTTPUnauthorized(text="the job's token is missing or wrong")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_SECONDS:g} s") from None


@web.middleware
async def _note(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[_ASKED].add(request.protocol)
    return await handler(request)


class Runner(web.AppRunner):
    """aiohttp's runner. It closes a connection that brings no complete header of a request within `header_seconds`."""

    def __init__(self, app: web.Application, *, header_seconds: float = HEADER_SECONDS, **options: object) -> None:
        app[_ASKED] = set()
        app.middlewares.insert(0, _note)
        super().__init__(app, keepalive_timeout=SERVER_KEEP_SECONDS, **options)  # type: ignore[arg-type]
        self._header_seconds = header_seconds
        self._watching: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        await super().setup()
        self._watching = asyncio.create_task(self._watch())

    async def cleanup(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await super().cleanup()

    async def _watch(self) -> None:
        clock, since = asyncio.get_running_loop().time, dict[object, float]()
        asked = self.app[_ASKED]
        while self.server is not None:
            there = self.server.connections
            asked.intersection_update(there)
            since = {connection: since.get(connection, clock()) for connection in there if connection not in asked}
            for connection in there:
                if clock() - since.get(connection, clock()) > self._header_seconds:
                    connection.force_close()
            await asyncio.sleep(self._header_seconds / 5)


async def listen(app: web.Application, host: str, port: int) -> Runner:
    """Start to serve. Call `cleanup` of the result to end. Raises OSError if the address is not available."""
    runner = Runner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


async def healthz(_: web.Request) -> web.Response:
    """The answer of a server that is alive."""
    return web.Response(text="ok")


def metrics(registry: CollectorRegistry) -> Handler:
    """Answers with the metrics of `registry`."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return answer
