"""What an iteration's generation and inference did, in numbers: overlap, seconds saved, idle instances. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.protocol.messages import Span

Interval = tuple[float, float]


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union of [start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def clipped(spans: Iterable[Span], start: float, end: float) -> list[Interval]:
    """The spans' parts within [start, end)."""
    return [(max(s.start, start), min(s.end, end)) for s in spans if s.end > start and s.start < end]


@dataclass(frozen=True)
class StageAccount:
    """Seconds. `hidden`: of inference while samples were still generated, all scorers together; `saved`: that work,
    done by all scorers at once after generation, as without fusion (what migration cost generation is not in it).
    `idle`: by rollout, neither generating nor scored beside it."""

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
    """`begun`, `generated`, `ended`: of the stage's generation and inference, seconds since the epoch. `generating`: a
    span for each rollout; `scoring`: inference spans by the rollout that the scorer sits beside."""
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
    """Sums over iterations."""
    before = before or {}
    return {name: before.get(name, 0.0) + value for name, value in facts.items()}
