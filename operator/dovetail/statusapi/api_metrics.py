"""Metrics of the status API itself, as ASGI middleware (FastAPI's own would buffer streams)."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ApiMetrics:
    """The middleware. Labels are bounded, because they hold the route's template and never the path."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter("dovetail_api_requests", "Requests answered.", ["route", "code"], registry=registry)
        self._seconds = Histogram(
            "dovetail_api_request_seconds",
            "Time to the first byte of the answer.",
            ["route"],
            registry=registry,
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
        )
        self._open = Gauge("dovetail_api_requests_in_progress", "Requests and streams under way.", registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._requests.labels(route, str(message["status"])).inc()
                self._seconds.labels(route).observe(time.perf_counter() - begun)
            await send(message)

        with self._open.track_inprogress():
            await self._app(scope, receive, watched)
