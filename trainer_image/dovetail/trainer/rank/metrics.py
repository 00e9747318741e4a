"""Prometheus metrics of a trainer rank, served on its own port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

from dovetail.protocol.http.header_deadline import HEADER_SECONDS
from dovetail.protocol.messages import CommandResult

# These metrics of commands are shown. The set is fixed, whatever later steps report.
SHOWN = frozenset(
    {
        "loss",
        "accuracy",
        "reward",
        "kl",
        "policy_loss",
        "value_loss",
        "approx_kl",
        "clipfrac",
        "entropy",
        "explained_variance",
        "grad_norm",
        "learning_rate",
        "actor_grad_norm",
        "critic_grad_norm",
        "actor_learning_rate",
        "critic_learning_rate",
        "mismatch_kl",
        "response_length",
    }
)


class TrainerMetrics:
    """The metrics of this rank. Labels: `kind` of a command (eight), `stage` (three), `name` (SHOWN)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.generation = Gauge("dovetail_trainer_generation", "Current generation, 0: none", registry=self.registry)
        self.rejoins = Counter("dovetail_trainer_rejoins", "Generations that this process left", registry=self.registry)
        self.step = Gauge("dovetail_trainer_step", "Last applied step", ["stage"], registry=self.registry)
        self.failures = Counter(
            "dovetail_trainer_command_failures", "Commands that failed", ["kind"], registry=self.registry
        )
        self.seconds = Histogram(
            "dovetail_trainer_command_seconds",
            "Duration of commands",
            ["kind"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=self.registry,
        )
        self.idle_seconds = Counter(
            "dovetail_trainer_idle_seconds", "Time spent waiting for commands", registry=self.registry
        )
        self.values = Gauge(
            "dovetail_trainer_value", "Latest value of a training metric", ["name"], registry=self.registry
        )

    def observe(self, kind: str, result: CommandResult, seconds: float, stage: str | None, step: int) -> None:
        """Record an executed command that took `seconds`."""
        self.seconds.labels(kind).observe(seconds)
        if not result.ok:
            self.failures.labels(kind).inc()
        if stage is not None:
            self.step.labels(stage).set(step)
        if kind == "step":
            for name in SHOWN & result.metrics.keys():
                self.values.labels(name).set(result.metrics[name])

    def serve(self, port: int, host: str) -> None:
        """Serve /metrics from a thread. Raises OSError if the port is taken."""
        MetricsServer((host, port), self.registry).start()


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers one request per connection, each in a thread. A connection is closed after `seconds`. A scrape takes
    milliseconds. prometheus_client's `start_http_server` would wait for the rest of a request for ever."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        seconds: float = HEADER_SECONDS,
    ) -> None:
        """Raises OSError if the port is taken."""
        # By default WSGIServer supports IPv4 only.
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _SilentHandler)
        self.set_app(make_wsgi_app(registry))
        self._seconds = seconds
        self._opened: dict[Any, float] = {}

    def start(self) -> None:
        """Serve from a thread of its own."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._opened[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._opened.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that last too long. socketserver calls this about twice a second."""
        for connection, opened in list(self._opened.items()):
            if time.monotonic() - opened > self._seconds:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write nothing, because scrapes are not logged."""
