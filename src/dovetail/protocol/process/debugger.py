"""Waits for a debugger. DOVETAIL_DEBUG names the process that waits until a debugger attaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

DEBUG = "DOVETAIL_DEBUG"
HOST, PORT = "127.0.0.1", 5678


def asked_port(name: str, value: str) -> int | None:
    """The port of process `name` in DOVETAIL_DEBUG, for example "trainer-0" or "trainer-0:5679,coordinator". None if it
    does not name the process. Raises ValueError."""
    for part in value.split(","):
        process, _, port = part.strip().partition(":")
        if process == name:
            if port and not port.isdecimal():
                raise ValueError(f"{DEBUG} is {value!r}; write a process and a port, for example trainer-0:{PORT}")
            return int(port or PORT)
    return None


def wait_for_debugger(name: str, log: Callable[..., None], environ: Mapping[str, str] = os.environ) -> None:
    """If DOVETAIL_DEBUG names this process, listen for debugpy's clients (VS Code, nvim-dap, ...) and wait for one.

    `log` gets the event debugger.waiting with the address. Afterwards `breakpoint()` stops in the debugger. Raises
    ValueError where debugpy is not installed."""
    port = asked_port(name, environ.get(DEBUG, ""))
    if port is None:
        return
    try:
        import debugpy
    except ImportError as error:
        raise ValueError(f"{DEBUG} needs debugpy: pip install debugpy") from error
    host, port = debugpy.listen((HOST, port))
    log("debugger.waiting", address=f"{host}:{port}")
    debugpy.wait_for_client()
    log("debugger.attached")
