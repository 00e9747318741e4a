"""Asks the coordinators of running jobs for their progress. It runs beside the reconciliation, which never waits for
it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from dovetail.kube import coordinator_http
from dovetail.kube.coordinator_http import NoAnswer
from dovetail.operator.cluster.object_cache import Key
from dovetail.operator.reconcile import progress
from dovetail.operator.reconcile.children import Children, is_over
from dovetail.operator.reconcile.history import JobHistory

TIMEOUT_SECONDS = 3.0
CATCH_UP_SECONDS = 10.0
AT_A_TIME = 64
PAGES = 64  # of history in one turn
# Iterations take longer than the turns of a thousand jobs.
ASKS_PER_SECOND = 50.0


def _told(document: Mapping[str, Any]) -> object:
    """The fields of an answer that go into a job's status."""
    return progress.fields(document), progress.plan_problem(document), progress.health(document)


@dataclass
class _Followed:
    """A coordinator that is asked. `answer` has the fields of `_told` in its last answer. It is None before the first
    one."""

    address: str
    task: asyncio.Task[None]
    answer: dict[str, Any] | None = None


class CoordinatorPoller:
    """Asks coordinators at their pod addresses, so it needs no DNS. Each is asked every `seconds`, and less often if
    there are many. `changed` is called with each job whose status has news, after its finished steps were read too."""

    def __init__(
        self, session: aiohttp.ClientSession, seconds: float, changed: Callable[[Key], Awaitable[None]]
    ) -> None:
        self._session = session
        self._seconds = seconds
        self._changed = changed
        self._followed: dict[Key, _Followed] = {}
        self._histories: dict[Key, JobHistory] = {}
        self._slots = asyncio.Semaphore(AT_A_TIME)

    def report(self, key: Key, children: Children, token: str | None) -> dict[str, Any] | None:
        """The newest answer. None if there is none yet. From this call on the coordinator is asked while its pod
        runs."""
        pod = progress.coordinator_pod(children)
        address = (pod or {}).get("status", {}).get("podIP")
        if pod is None or token is None or not address or is_over(pod) or pod["status"].get("phase") != "Running":
            self._stop(key)
            return None
        there = self._followed.get(key)
        if there is not None and there.address == address:
            return there.answer
        self._stop(key)
        self._followed[key] = _Followed(address, asyncio.create_task(self._follow(key, address, token)))
        return None

    def history(self, key: Key) -> JobHistory | None:
        """The steps that this job's coordinators have reported, if any."""
        return self._histories.get(key)

    def forget(self, key: Key) -> None:
        """Stop asking this job's coordinator, and drop its steps."""
        self._stop(key)
        self._histories.pop(key, None)

    def _stop(self, key: Key) -> None:
        there = self._followed.pop(key, None)
        if there is not None:
            there.task.cancel()

    async def close(self) -> None:
        """Stop asking all coordinators."""
        tasks = [there.task for there in self._followed.values()]
        for key in list(self._followed):
            self._stop(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, key: Key, address: str, token: str) -> None:
        known: object = None
        while True:
            async with self._slots:
                answer = await self._ask(address, token)
                told = _told(answer or {})
                news = answer is not None and told != known
                if news:
                    await self._catch_up(key, address, token)
            self._followed[key].answer = answer
            if news:
                known = told
                await self._changed(key)
            await asyncio.sleep(max(self._seconds, len(self._followed) / ASKS_PER_SECOND))

    async def _catch_up(self, key: Key, address: str, token: str) -> None:
        """Read the steps that were finished since the last call."""
        history = self._histories.get(key)
        if history is None or history.token != token:  # it is of an earlier job with this name
            history = self._histories[key] = JobHistory(token)
        with contextlib.suppress(NoAnswer, TimeoutError):  # the rest comes with the next news
            async with asyncio.timeout(CATCH_UP_SECONDS):
                for _ in range(PAGES):
                    page = await self._get(address, token, f"/v1/history?offset={history.offset}")
                    rows, offset = page.get("rows"), page.get("offset")
                    if not isinstance(rows, list) or not isinstance(offset, int) or offset <= history.offset:
                        return
                    history.take(rows)
                    history.offset = offset

    async def _ask(self, address: str, token: str) -> dict[str, Any] | None:
        try:  # an answer that cannot be read counts as none
            return progress.judged(await self._get(address, token, "/v1/status"))
        except (NoAnswer, ValueError):
            return None

    async def _get(self, address: str, token: str, path: str) -> dict[str, Any]:
        """The JSON object at the coordinator's path. Raises NoAnswer."""
        url = coordinator_http.pod_url(address) + path
        return coordinator_http.document(
            await coordinator_http.fetch(
                self._session, url, token, seconds=TIMEOUT_SECONDS, most=coordinator_http.DOCUMENT_BYTES
            )
        )
