"""The operator's own Prometheus metrics, in base units."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.operator.job_metrics import JobMetrics


class OperatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "dovetail_operator_reconciles", "Jobs looked at.", ["outcome"], registry=self.registry
        )
        self._seconds = Histogram(
            "dovetail_operator_reconcile_seconds",
            "Time for one job.",
            registry=self.registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60),
        )
        self._events = Histogram(
            "dovetail_operator_event_seconds",
            "From the first event of a job that was not acted on to its state applied.",
            registry=self.registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300),
        )
        self._waiting = Gauge("dovetail_operator_queue_length", "Jobs that wait.", registry=self.registry)
        self.leading = Gauge("dovetail_operator_leading", "1 while this replica leads.", registry=self.registry)

        self.jobs = JobMetrics()
        self._requests = _Requests()
        for collector in (self.jobs, self._requests):
            self.registry.register(collector)

    def count_requests(self, made: Callable[[], int]) -> None:
        """Count the requests to the API server. `made` returns how many it got so far."""
        self._requests.made = made

    def reconciled(self, outcome: str, seconds: float, waiting: int) -> None:
        self._reconciles.labels(outcome).inc()
        self._seconds.observe(seconds)
        self._waiting.set(waiting)

    def applied(self, seconds: float) -> None:
        """Record that an event of a job was acted on, `seconds` after it came."""
        self._events.observe(seconds)


class _Requests(Collector):
    """The client counts its requests itself."""

    def __init__(self) -> None:
        self.made: Callable[[], int] = lambda: 0

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("dovetail_operator_api_requests", "Requests to the API server.", self.made())
