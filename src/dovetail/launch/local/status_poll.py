"""Polls the coordinator's GET /v1/status in a thread. It is no error if the coordinator does not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from dovetail.protocol.http import direct

POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 2.0


def fetch_status(url: str, token: str, timeout: float = TIMEOUT_SECONDS) -> dict[str, Any] | None:
    """The status document, or None while there is no answer."""
    try:
        document = json.loads(direct.ask(f"{url}/v1/status", timeout, token) or "")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


class StatusPoller:
    """Keeps the newest status. `on_status` is called with each one, from the polling thread."""

    def __init__(self, url: str, token: str, on_status: Callable[[dict[str, Any]], object]) -> None:
        self._url = url
        self._token = token
        self._on_status = on_status
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(TIMEOUT_SECONDS + 1.0)

    def _run(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            status = fetch_status(self._url, self._token)
            if status is not None and not self._done.is_set():
                self._on_status(status)
