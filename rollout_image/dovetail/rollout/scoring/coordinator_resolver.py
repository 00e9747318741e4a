"""Lets aiohttp use the coordinator's last known address."""

from __future__ import annotations

import asyncio
import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from dovetail.protocol.last_address import LastAddress


class LastAddressResolver(AbstractResolver):
    """Resolves the one host of `address`."""

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
