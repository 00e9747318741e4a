"""Asks running jobs for their progress from time to time, so that the history is known here when a coordinator is
gone."""

from __future__ import annotations

import asyncio
import logging

from dovetail.kube.connection import KubeError
from dovetail.statusapi import view
from dovetail.statusapi.coordinator_reader import CoordinatorReader
from dovetail.statusapi.kube import Kube, Object, jobs_path, page

PAGE = 200
AT_ONCE = 16
_WORKING = ("Scheduled", "Running")

log = logging.getLogger("uvicorn.error")


async def watch(kube: Kube, coordinators: CoordinatorReader, namespaces: tuple[str, ...], seconds: float) -> None:
    """Every `seconds`, ask the coordinator of each running job. This runs until cancelled."""
    while True:
        try:
            for namespace in namespaces or (None,):
                await _look(kube, coordinators, namespace)
        except KubeError as error:
            log.warning("cannot list RLHFJobs: %s", error)
        await asyncio.sleep(seconds)


async def _look(kube: Kube, coordinators: CoordinatorReader, namespace: str | None) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(job: Object) -> None:
        async with slots:
            await coordinators.progress(job)

    rest: str | None = ""
    while rest is not None:
        found = await page(kube, jobs_path(namespace), {"continue": rest} if rest else {}, PAGE)
        running = [job for job in found["items"] if view.state_of(view.status_of(job)) in _WORKING]
        await asyncio.gather(*map(ask, running))
        rest = found["metadata"].get("continue") or None
