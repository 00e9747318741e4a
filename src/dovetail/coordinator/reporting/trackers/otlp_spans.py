"""Sends the timeline of an iteration as OpenTelemetry spans, with OTLP over HTTP.

An iteration is a trace. Its root span lasts from the start of its first span to the end of its last one. All other
spans are children of the root. Ids are derived from the run's id, so an iteration that is sent again is the same
trace."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from dovetail.coordinator.reporting.trackers.tracker_settings import State, TrackerSettings

# The maximum number of spans in one request.
BATCH = 2000


class OtlpClient:
    """A client of an OpenTelemetry collector. `settings.url` is the collector's address, such as http://collector:4318.
    Without it OTEL_EXPORTER_OTLP_ENDPOINT is used."""

    def __init__(self, settings: TrackerSettings, state: State) -> None:
        endpoint = None if settings.url is None else f"{settings.url.rstrip('/')}/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._settings = settings

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        """This sends nothing, because Prometheus collects the metrics."""

    def trace(self, document: Mapping[str, Any]) -> None:
        """Send the spans of a timeline. Raises ConnectionError if the collector does not accept them."""
        spans = spans_of(document, self._settings)
        for at in range(0, len(spans), BATCH):
            if self._exporter.export(spans[at : at + BATCH]) is not SpanExportResult.SUCCESS:
                raise ConnectionError("the OTLP collector did not take the spans")

    def finish(self, succeeded: bool) -> None:
        self._exporter.shutdown()


def spans_of(document: Mapping[str, Any], settings: TrackerSettings) -> list[ReadableSpan]:
    """The spans of a Chrome trace (`dovetail.protocol.files.trace`). Each process is a service instance. It does no
    I/O."""
    events = document["traceEvents"]
    origin = float(document["otherData"]["start_seconds"])
    iteration = int(document["otherData"]["iteration"])
    processes = {e["pid"]: str(e["args"]["name"]) for e in events if e.get("name") == "process_name"}
    bars = [e for e in events if e.get("ph") == "X"]
    if not bars:
        return []
    trace_id = _number(16, settings.run, iteration)

    def context(*key: object) -> SpanContext:
        return SpanContext(trace_id, _number(8, settings.run, iteration, *key), False, TraceFlags(TraceFlags.SAMPLED))

    def resource(process: str) -> Resource:
        about = {"service.namespace": settings.project, "dovetail.job": settings.name, "dovetail.run": settings.run}
        return Resource({"service.name": "dovetail", "service.instance.id": process, **about})

    def at(microseconds: float) -> int:
        return int((origin * 1e6 + microseconds) * 1000)

    resources = {process: resource(process) for process in (*processes.values(), "coordinator")}
    root = context("root")
    found = [
        ReadableSpan(
            f"iteration {iteration}",
            context=root,
            resource=resources["coordinator"],
            attributes={"iteration": iteration},
            start_time=at(min(e["ts"] for e in bars)),
            end_time=at(max(e["ts"] + e["dur"] for e in bars)),
        )
    ]
    for number, event in enumerate(bars):
        given = {key: value for key, value in event["args"].items() if isinstance(value, str | int | float | bool)}
        found.append(
            ReadableSpan(
                str(event["name"]),
                context=context(number),
                parent=root,
                resource=resources[processes[event["pid"]]],
                attributes={"iteration": iteration, "lane": event["cat"], **given},
                start_time=at(event["ts"]),
                end_time=at(event["ts"] + event["dur"]),
            )
        )
    return found


def _number(size: int, *key: object) -> int:
    """A number of `size` bytes that is derived from a key. It is never 0."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1
