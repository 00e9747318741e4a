"""The HTTP server of a rank's metrics. It runs prometheus_client's application and closes slow connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from dovetail.protocol.http.header_deadline import HEADER_SECONDS


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers one request per connection, each in a thread. A connection is closed after `seconds`. A scrape takes
    milliseconds. prometheus_client's `start_http_server` would wait for the rest of a request for ever."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        seconds: float = HEADER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises OSError if the port is taken."""
        # By default WSGIServer supports IPv4 only.
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _SilentHandler)
        self.set_app(make_wsgi_app(registry))
        self._seconds, self._clock = seconds, clock
        self._opened: dict[Any, float] = {}

    def start(self) -> None:
        """Serve from a thread of its own."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._opened[request] = self._clock()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._opened.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that last too long. socketserver calls this about twice a second."""
        for connection, opened in list(self._opened.items()):
            if self._clock() - opened > self._seconds:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write nothing, because scrapes are not logged."""
