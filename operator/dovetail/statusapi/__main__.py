"""`python -m dovetail.statusapi` serves the status API until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dovetail.kube import coordinator_http
from dovetail.kube.connection import KubeError
from dovetail.protocol.http.header_deadline import SERVER_KEEP_SECONDS, HeaderDeadline
from dovetail.protocol.process.endings import cancel
from dovetail.statusapi import view
from dovetail.statusapi.api_settings import ApiSettings
from dovetail.statusapi.app import create_app
from dovetail.statusapi.auth import Auth
from dovetail.statusapi.coordinator_pods import CoordinatorPods
from dovetail.statusapi.coordinator_reader import CoordinatorReader
from dovetail.statusapi.jobs import Service
from dovetail.statusapi.kube import KubeClient, Object, jobs_path, page

PAGE = 200  # jobs
AT_ONCE = 16  # questions to coordinators
_WORKING = ("Scheduled", "Running")

log = logging.getLogger("uvicorn.error")


class Http(HeaderDeadline, H11Protocol):
    """uvicorn's HTTP with a deadline for headers. h11 also limits how long a header may be."""


@asynccontextmanager
async def serve(settings: ApiSettings) -> AsyncIterator[Service]:
    """The service for the cluster that the environment names."""

    async def at_a_fixed_address(job: Object) -> str:
        metadata = job["metadata"]
        return settings.coordinator_url.format(job=metadata["name"], namespace=metadata["namespace"])

    async with KubeClient(settings.request_seconds) as kube, coordinator_http.session() as session:
        url = at_a_fixed_address if settings.coordinator_url else CoordinatorPods(kube).url
        coordinators = CoordinatorReader(
            kube, session, url, settings.poll_seconds, time.monotonic, answer_seconds=settings.request_seconds
        )
        watching = None
        if settings.watch_seconds > 0:
            watching = asyncio.create_task(watch(kube, coordinators, settings.namespaces, settings.watch_seconds))
        service = Service(
            kube,
            Auth(kube, settings.auth_cache_seconds, settings.audiences, time.monotonic),
            coordinators,
            settings,
            clock=time.monotonic,
        )
        try:
            yield service
        finally:
            if watching is not None:
                await cancel([watching])


def main(argv: list[str] | None = None) -> int:
    """The entry point. It takes no arguments. `ApiSettings` has the settings."""
    if argv or (argv is None and len(sys.argv) > 1):
        print("takes no arguments; it is set by DOVETAIL_API_* variables", file=sys.stderr)
        return 2
    try:
        settings = ApiSettings.read()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(lambda: serve(settings)),
            host=settings.host,
            port=settings.port,
            http=Http,
            ssl_certfile=settings.tls_certificate or None,
            ssl_keyfile=settings.tls_key or None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=SERVER_KEEP_SECONDS,
            timeout_graceful_shutdown=5,
        )
    )
    server.run()
    return 0 if server.started else 1


async def watch(kube: KubeClient, coordinators: CoordinatorReader, namespaces: tuple[str, ...], seconds: float) -> None:
    """Every `seconds`, ask the coordinator of each running job, so that the history is known here when a coordinator is
    gone. This runs until cancelled."""
    while True:
        try:
            for namespace in namespaces or ("",):
                await _look(kube, coordinators, namespace)
        except KubeError as error:
            log.warning("cannot list RLHFJobs: %s", error)
        await asyncio.sleep(seconds)


async def _look(kube: KubeClient, coordinators: CoordinatorReader, namespace: str) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
