"""Writes spans as a Chrome trace. Perfetto (https://ui.perfetto.dev) and chrome://tracing open this JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import COORDINATOR

# Perfetto sorts processes by this index. The coordinator comes first, then the trainers, then the rollouts.
_ORDER = (COORDINATOR, "trainer")


def _rank(process: str) -> tuple[int, str]:
    for index, prefix in enumerate(_ORDER):
        if process.startswith(prefix):
            return index, process
    return len(_ORDER), process


def _tracks(spans: list[Span]) -> list[tuple[Span, str]]:
    """Each span of one lane, with the name of its track. The spans of a track may be nested but must not overlap
    partly. So a span that would overlap partly goes to a second track `lane #2`, and so on."""
    stacks: list[list[float]] = []
    placed = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for stack in stacks:
            while stack and stack[-1] <= span.start:
                stack.pop()
            if not stack or span.end <= stack[-1]:
                break
        else:
            stack = []
            stacks.append(stack)
        stack.append(span.end)
        number = next(i for i, s in enumerate(stacks) if s is stack)
        placed.append((span, span.lane if number == 0 else f"{span.lane} #{number + 1}"))
    return placed


Curve = Sequence[tuple[float, float]]


def chrome_trace(
    spans: Iterable[Span], metadata: dict[str, Any] | None = None, counters: Mapping[str, Curve] | None = None
) -> dict[str, Any]:
    """The trace document of some spans, with a process for each `Span.process` and a thread for each lane. Times are in
    microseconds since the earliest start. `otherData.start_seconds` has this start in seconds since the epoch. If a
    clock was set back, a span may end before it starts. It counts as empty. `counters`: the coordinator's curves as
    (seconds since the epoch, value)."""
    lanes: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if span.end < span.start:
            span = span.model_copy(update={"end": span.start})
        lanes.setdefault((span.process, span.lane), []).append(span)
    origin = min((span.start for group in lanes.values() for span in group), default=0.0)

    events: list[dict[str, Any]] = []
    processes = sorted({process for process, _ in lanes}, key=_rank)
    for pid, process in enumerate(processes, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        placed = [p for (owner, _), group in sorted(lanes.items()) if owner == process for p in _tracks(group)]
        tids = {track: tid for tid, track in enumerate(dict.fromkeys(track for _, track in placed), start=1)}
        for track, tid in tids.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        for span, track in placed:
            args = dict(span.args)
            if span.iteration is not None:
                args["iteration"] = span.iteration
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": pid,
                    "tid": tids[track],
                    "ts": round((span.start - origin) * 1e6, 3),
                    "dur": round((span.end - span.start) * 1e6, 3),
                    "args": args,
                }
            )
    pid = next((n for n, process in enumerate(processes, start=1) if process == COORDINATOR), 1)
    for name, points in sorted((counters or {}).items()):
        for when, value in points:
            stamp = round(max(0.0, when - origin) * 1e6, 3)
            events.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": stamp, "args": {"value": value}})
    return {
        "displayTimeUnit": "ms",
        "otherData": {"start_seconds": origin, **(metadata or {})},
        "traceEvents": events,
    }
