"""The HTTP client of processes that talk to each other, and what it does when a connection that it kept has ended."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver

from dovetail.protocol.http.header_deadline import CLIENT_KEEP_SECONDS

_reused: ContextVar[list[bool]] = ContextVar("reused")


def client_session(*, resolver: AbstractResolver | None = None, **options: Any) -> aiohttp.ClientSession:
    """A session without a limit of connections. It ignores the environment's proxies. With `resolver`, each new
    connection asks for the address anew."""
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_reuse)
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=CLIENT_KEEP_SECONDS, resolver=resolver, use_dns_cache=resolver is None
    )
    return aiohttp.ClientSession(connector=connector, trust_env=False, trace_configs=[tracing], **options)


async def resend(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A middleware for requests that may arrive twice. A request whose kept connection ends before any byte of an
    answer is sent again. This is no failure of the server, which may just have closed the connection."""
    while True:
        reused: list[bool] = []
        _reused.set(reused)
        try:
            return await handler(request)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # Each attempt uses up a kept connection, so this ends. A new connection that fails is a failure.
            if not reused or isinstance(error, aiohttp.ClientConnectorError):
                raise


async def _note_reuse(*_: object) -> None:
    if (reused := _reused.get(None)) is not None:
        reused.append(True)
