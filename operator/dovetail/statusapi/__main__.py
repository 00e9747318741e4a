"""`python -m dovetail.statusapi` serves the status API until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dovetail.kube import coordinator_http
from dovetail.kube.connection import KubeError
from dovetail.protocol.http.header_deadline import SERVER_KEEP_SECONDS, HeaderDeadline
from dovetail.statusapi import view
from dovetail.statusapi.answer_room import AnswerRoom
from dovetail.statusapi.app import create_app
from dovetail.statusapi.auth import Auth
from dovetail.statusapi.coordinator_pods import CoordinatorPods
from dovetail.statusapi.coordinator_reader import CoordinatorReader
from dovetail.statusapi.jobs import Service
from dovetail.statusapi.kube import Kube, KubeClient, Object, jobs_path, page

PAGE = 200  # jobs
AT_ONCE = 16  # questions to coordinators
_WORKING = ("Scheduled", "Running")

log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class ApiSettings:
    """The settings of an administrator. They are `DOVETAIL_API_*` variables of the pod. A token must be for one of
    `audiences`. Empty means the API server's own. Jobs in `namespaces` are shown. Empty means all. With
    `tls_certificate` and `tls_key` (paths) the API serves HTTPS. `coordinator_url` has {job} and {namespace}. It is for
    clusters in which the API cannot reach the addresses of pods. If it is empty, these addresses are used. Every
    `watch_seconds` all running jobs are asked for their progress, so that it is known when they are done. If it is 0,
    only jobs that somebody asks about are asked. Large answers (logs, traces, the run page's) take at most
    `answer_bytes` of memory together, and those to one user at most `user_bytes`. Times are in seconds."""

    host: str = "0.0.0.0"
    port: int = 8080
    namespaces: tuple[str, ...] = ()
    audiences: tuple[str, ...] = ()
    tls_certificate: str = ""
    tls_key: str = ""
    coordinator_url: str = ""
    watch_seconds: float = 5.0
    auth_cache_seconds: float = 10.0
    poll_seconds: float = 2.0
    request_seconds: float = 10.0
    streams: int = 200
    answer_bytes: int = 48 << 20
    user_bytes: int = 24 << 20

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> ApiSettings:
        """Read the settings from the environment. A variable that is not set keeps its default. Raises ValueError that
        names the variable."""
        found: dict[str, Any] = {}
        for name, default in ApiSettings().__dict__.items():
            variable = f"DOVETAIL_API_{name.upper()}"
            text = environ.get(variable, "")
            if not text:
                continue
            if isinstance(default, tuple):
                found[name] = tuple(part.strip() for part in text.split(",") if part.strip())
                continue
            try:
                found[name] = type(default)(text)
            except ValueError as error:
                raise ValueError(f"{variable} is {text!r}, not a number") from error
        settings = ApiSettings(**found)
        if bool(settings.tls_certificate) != bool(settings.tls_key):
            raise ValueError("DOVETAIL_API_TLS_CERTIFICATE and DOVETAIL_API_TLS_KEY belong together; give both or none")
        return settings


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
            namespaces=settings.namespaces,
            poll_seconds=settings.poll_seconds,
            streams=settings.streams,
            room=AnswerRoom(settings.answer_bytes, settings.user_bytes),
            clock=time.monotonic,
        )
        try:
            yield service
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)


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


async def watch(kube: Kube, coordinators: CoordinatorReader, namespaces: tuple[str, ...], seconds: float) -> None:
    """Every `seconds`, ask the coordinator of each running job, so that the history is known here when a coordinator is
    gone. This runs until cancelled."""
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


if __name__ == "__main__":
    sys.exit(main())
