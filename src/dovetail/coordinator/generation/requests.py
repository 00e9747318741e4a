"""What the generator says to vLLM servers: requests, and their abortion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from dovetail.coordinator.fleet.fleet import Instance
from dovetail.coordinator.generation.stream import abort
from dovetail.coordinator.generation.work import GenerationSettings, Work
from dovetail.manifest.types import Generation
from dovetail.protocol.sampling import sampling_params

MODEL = "actor"


def body(work: Work, generation: Generation, instance: Instance, left: int, interval: int) -> dict[str, Any]:
    """One request: `left` more tokens after the prompt and what there is, `interval` of them in an event."""
    sampler = instance.abilities.get("sampler", "counter")
    params = sampling_params(generation, work.seed, left, sampler, generated=len(work.tokens))
    params["stream_interval"] = interval
    return {
        "request_id": work.request_id,
        "model": MODEL,
        "token_ids": work.prompt + work.tokens,
        "sampling_params": params,
        "stream": True,
    }


class Requests:
    """The connections to all servers, opened on first use; close it in the end."""

    def __init__(self, token: str, settings: GenerationSettings, log: Callable[..., None]) -> None:
        self._token = token
        self._settings = settings
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect),
                headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            )
        return self._session

    def abort(self, instance: Instance, ids: Sequence[str]) -> None:
        """Ask, and do not wait: the streams tell."""

        async def send() -> None:
            error = await abort(self.session, instance.url, ids, self._settings.abort)
            self._log("requests.aborted", instance=instance.name, requests=len(ids), error=error)

        task = asyncio.create_task(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Idempotent."""
        await cancel(self._aborts)
        if self._session is not None:
            await self._session.close()
            self._session = None


async def cancel(tasks: Any) -> None:
    """Cancel all, and wait for them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
