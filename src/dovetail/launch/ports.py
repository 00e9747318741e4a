"""Reserves free ports until a process binds them, also each time the process is restarted."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from dovetail.protocol.errors import RunError

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortReservation:
    """Ports on one host. They are below the range that the kernel gives to outgoing connections, because such a
    connection could take a port in the seconds until its server binds it. Each port is also the name of an abstract
    Unix socket, so that other launchers on the machine do not take it. The kernel frees the socket when this process
    ends."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._locks: list[socket.socket] = []

    def reserve(self, names: Iterable[str]) -> dict[str, int]:
        """Reserve one port for each name. Raises RunError if there are not enough."""
        return {name: self._next() for name in names}

    def close(self) -> None:
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def _next(self) -> int:
        low, high = _candidates()
        chooser = random.SystemRandom()
        for _ in range(500):
            port = chooser.randrange(low, high)
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lock.bind(f"\0dovetail-port-{port}")
                with contextlib.closing(socket.socket()) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((self._host, port))
            except OSError:
                lock.close()
                continue
            self._locks.append(lock)
            return port
        raise RunError(f"no free TCP port between {low} and {high} on {self._host}; end some other servers")


def _candidates() -> tuple[int, int]:
    try:
        first = int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return (10_000, first) if first > 12_000 else (first, 60_000)
