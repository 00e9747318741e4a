"""The HTTP client of processes that talk to each other, and what it does when a connection that it kept has ended."""

from __future__ import annotations

import asyncio
import socket
from contextvars import ContextVar
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from dovetail.protocol.http.header_deadline import CLIENT_KEEP_SECONDS
from dovetail.protocol.http.last_address import LastAddress

_resent = 0
_reused: ContextVar[list[bool]] = ContextVar("reused")


def client_session(*, address: LastAddress | None = None, **options: Any) -> aiohttp.ClientSession:
    """A session without a limit of connections. It ignores the environment's proxies. With `address`, the
    session is for this host, and each new connection asks for its address anew."""
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_reuse)
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=CLIENT_KEEP_SECONDS,
        resolver=None if address is None else _Resolver(address),
        use_dns_cache=address is None,
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
            note_resent()


def note_resent() -> None:
    """Count a request that is sent again."""
    global _resent
    _resent += 1


def resent() -> int:
    """How many requests of this process were sent again so far."""
    return _resent


async def _note_reuse(*_: object) -> None:
    if (reused := _reused.get(None)) is not None:
        reused.append(True)


class _Resolver(AbstractResolver):
    """Resolves the one host of `address`, to its last known address while no name server answers."""

    def __init__(self, address: LastAddress) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of the host. Raises OSError, also for any other host."""
        if host != self._address.host:
            raise OSError(f"{host} is not {self._address.host}")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await asyncio.to_thread(self._address.find)
        ]

    async def close(self) -> None:
        """There is nothing to close."""
