"""Ports for what a test starts itself."""

from __future__ import annotations

from dovetail.launch.ports import PortReservation

_RESERVED: dict[str, PortReservation] = {}


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nothing listens on.

    Its server may be slow to open it, or close it and open it again: until this process ends the kernel gives it to no
    outgoing connection, and no other test or launcher on this machine gets it."""
    return _RESERVED.setdefault(host, PortReservation(host)).reserve(["a test"])["a test"]
