"""Polls the coordinator's GET /v1/status in a thread. It is no error if the coordinator does not answer."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 2.0


def fetch_status(url: str, token: str, timeout: float = TIMEOUT_SECONDS) -> dict[str, Any] | None:
    """The status document, or None while there is no answer."""
    request = urllib.request.Request(f"{url}/v1/status", headers={"Authorization": f"Bearer {token}"})
    # The coordinator runs on this machine, so a proxy from the environment must not be used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as reply:
            document = json.load(reply)
    except (OSError, ValueError, HTTPException, urllib.error.URLError):
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
