"""Asks a job's coordinator how far it is, at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp

from dovetail.api.env import COORDINATOR_PORT
from dovetail.operator.children import Children, is_over
from dovetail.operator.progress import coordinator_pod
from dovetail.operator.store import Key

TIMEOUT_SECONDS = 3.0


class Coordinators:
    """By pod address, so that no name service is needed. `seconds`: how old an answer may get before it is asked for
    again. `clock`: monotonic seconds."""

    def __init__(self, session: aiohttp.ClientSession, seconds: float, clock: Callable[[], float]) -> None:
        self._session = session
        self._seconds = seconds
        self._clock = clock
        self._asked: dict[Key, tuple[float, str, dict[str, Any] | None]] = {}

    async def report(self, key: Key, children: Children, token: str | None) -> dict[str, Any] | None:
        """The coordinator's status; None while there is none or it does not answer."""
        pod = coordinator_pod(children)
        address = (pod or {}).get("status", {}).get("podIP")
        if pod is None or token is None or not address or is_over(pod) or pod["status"].get("phase") != "Running":
            return None
        before = self._asked.get(key)
        now = self._clock()
        # A little less than the interval, or requests that come just too early would each wait for the next.
        if before is not None and before[1] == address and now - before[0] < self._seconds * 0.9:
            return before[2]
        document = await self._ask(address, token)
        self._asked[key] = (now, address, document)
        return document

    def forget(self, key: Key) -> None:
        self._asked.pop(key, None)

    async def _ask(self, address: str, token: str) -> dict[str, Any] | None:
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(
                f"http://{host}:{COORDINATOR_PORT}/v1/status",
                headers={"Authorization": f"Bearer {token}"},
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            ) as reply:
                document = await reply.json() if reply.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None
        return document if isinstance(document, dict) else None
