"""The jobs that streams follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

from dovetail.kube.connection import KubeError
from dovetail.protocol.process.endings import cancel
from dovetail.statusapi import view
from dovetail.statusapi.answers import KubeEvent
from dovetail.statusapi.kube import KubeClient, Object, core_path, get, jobs_path, page

# The number of a job's Events that are read. An Event has about 1 KB.
EVENTS_PAGE, EVENTS_PAGES = 500, 10


class Followed:
    """A job, with its Events, as the API server last told. It has one watch, and its Events another, however many
    `streams` follow it. Where the API server allows no watch, the job is asked for every `seconds`."""

    def __init__(self, kube: KubeClient, namespace: str, name: str, seconds: float) -> None:
        self._kube, self._namespace, self._name, self._seconds = kube, namespace, name, seconds
        self.streams = 0
        self._told: Object | KubeError | None = None
        self._known = asyncio.Event()
        self._events: list[KubeEvent] = []
        self._current = False  # whether the Events are the newest
        self._reading = asyncio.Lock()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        await cancel([self._task])

    async def job(self) -> Object:
        """The job. Raises KubeError, with the status 404 if it is gone."""
        await self._known.wait()
        if isinstance(self._told, KubeError):
            raise KubeError(self._told.status, str(self._told))
        assert self._told is not None
        return self._told

    async def events(self) -> list[KubeEvent]:
        """The job's newest Events, newest first. Raises KubeError."""
        async with self._reading:
            if not self._current:
                self._current = True  # until a change comes
                try:
                    self._events = await events_of(self._kube, await self.job())
                except BaseException:
                    self._current = False
                    raise
            return self._events

    async def _follow(self) -> None:
        while True:
            try:
                self._told = await get(self._kube, jobs_path(self._namespace, self._name))
            except KubeError as error:
                self._told = error
            self._current = False
            self._known.set()
            if not isinstance(self._told, KubeError):
                await self._watch(self._told)
            await asyncio.sleep(self._seconds)

    async def _watch(self, job: Object) -> None:
        """Until a watch ends, or the job is gone."""

        def changed(thing: Object) -> None:
            self._told = thing

        def happened(_: Object) -> None:
            self._current = False

        events, mine = core_path(self._namespace, "events"), about(job)
        with suppress(KubeError):
            there = await page(self._kube, events, {"fieldSelector": mine}, 1)
            version, since = job["metadata"]["resourceVersion"], there["metadata"]["resourceVersion"]
            fields = f"metadata.name={self._name}"
            watches = [
                asyncio.create_task(self._changes(jobs_path(self._namespace), fields, version, changed)),
                asyncio.create_task(self._changes(events, mine, since, happened)),
            ]
            try:
                await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(watches)

    async def _changes(self, path: str, fields: str, version: str, tell: Callable[[Object], None]) -> None:
        query = {"fieldSelector": fields, "resourceVersion": version}
        async with aclosing(self._kube.watch(path, query)) as changes:
            async for kind, thing in changes:
                if kind == "DELETED":
                    return
                if kind != "BOOKMARK":
                    tell(thing)


def about(job: Object) -> str:
    """The field selector of the Events about a job."""
    return f"involvedObject.kind=RLHFJob,involvedObject.uid={job['metadata']['uid']}"


async def events_of(kube: KubeClient, job: Object) -> list[KubeEvent]:
    """The newest Events about a job. A namespace may have any number of them."""
    newest: list[KubeEvent] = []
    query = {"fieldSelector": about(job)}
    for _ in range(EVENTS_PAGES):
        found = await page(kube, core_path(job["metadata"]["namespace"], "events"), query, EVENTS_PAGE)
        newest = view.newest([*newest, *view.kube_events(found)])
        rest = (found.get("metadata") or {}).get("continue")
        if not rest:
            break
        query["continue"] = rest
    return newest
