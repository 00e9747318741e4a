"""Computes figures of an iteration's generation and inference, such as overlap, seconds saved and idle instances. The
functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.protocol.messages import Span

Interval = tuple[float, float]


def union_seconds(intervals: Iterable[Interval]) -> float:
    """The total length, in seconds, of the union of [start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def clipped(spans: Iterable[Span], start: float, end: float) -> list[Interval]:
    """The parts of the spans within [start, end), as intervals."""
    return [(max(s.start, start), min(s.end, end)) for s in spans if s.end > start and s.start < end]


@dataclass(frozen=True)
class StageAccount:
    """The figures of one iteration, in seconds. `hidden` is the time of inference while samples were still generated,
    summed over the scorers. `saved` is the time that all scorers together would have needed for this work after
    generation, as without fusion. The cost of migrations is not subtracted. `idle` has for each rollout the time in
    which neither it nor its scorer worked."""

    seconds: float
    generation: float
    hidden: float
    saved: float
    idle: Mapping[str, float]


def account(
    begun: float,
    generated: float,
    ended: float,
    generating: Sequence[Span],
    scoring: Mapping[str, Sequence[Span]],
    scorers: int,
) -> StageAccount:
    """The figures of one iteration. The stage began at `begun`, its last sample was generated at `generated`, and it
    ended at `ended`, in seconds since the epoch. `generating` has one span for each rollout. `scoring` has the spans of
    inference, by the rollout beside the scorer. `scorers` is the number of scorers."""
    hidden = sum(union_seconds(clipped(spans, begun, generated)) for spans in scoring.values())
    names = {s.process for s in generating} | set(scoring)
    busy = {
        name: union_seconds(
            clipped([s for s in generating if s.process == name] + list(scoring.get(name, ())), begun, ended)
        )
        for name in names
    }
    return StageAccount(
        ended - begun,
        generated - begun,
        hidden,
        hidden / max(1, scorers),
        {name: max(0.0, ended - begun - seconds) for name, seconds in sorted(busy.items())},
    )


def totals(before: Mapping[str, Any] | None, facts: Mapping[str, float]) -> dict[str, float]:
    """The sums over iterations, which are `before` plus the figures of one more iteration."""
    before = before or {}
    return {name: before.get(name, 0.0) + value for name, value in facts.items()}
