"""Computes figures of an iteration's generation and inference, such as overlap, seconds saved and idle instances, and
records them in metrics, timeline, summary and history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.samples.fusion.fusion import StageFusion
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.lineup import Turn
from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import COORDINATOR, rollout_of

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
    which neither it nor its scorer worked. `overlap` is from the start of the first inference to the last generated
    sample, in seconds since the epoch, or None if they did not overlap."""

    seconds: float
    generation: float
    overlap: Interval | None
    hidden: float
    saved: float
    idle: Mapping[str, float]


def account(
    begun: float,
    generated: float,
    ended: float,
    generating: Sequence[Span],
    scoring: Sequence[Span],
    scorers: int,
) -> StageAccount:
    """The figures of one iteration. The stage began at `begun`, its last sample was generated at `generated`, and it
    ended at `ended`, in seconds since the epoch. `generating` has one span for each rollout. `scoring` has one for each
    scored batch. `scorers` is the number of scorers."""
    scored: dict[str, list[Span]] = {}
    for span in scoring:
        scored.setdefault(rollout_of(span.process), []).append(span)
    hidden = sum(union_seconds(clipped(spans, begun, generated)) for spans in scored.values())
    names = {s.process for s in generating} | set(scored)
    busy = {
        name: union_seconds(clipped([s for s in generating if s.process == name] + scored.get(name, []), begun, ended))
        for name in names
    }
    first = min((span.start for span in scoring), default=generated)
    return StageAccount(
        ended - begun,
        generated - begun,
        (first, generated) if first < generated else None,
        hidden,
        hidden / max(1, scorers),
        {name: max(0.0, ended - begun - seconds) for name, seconds in sorted(busy.items())},
    )


def totals(before: Mapping[str, Any] | None, facts: Mapping[str, float]) -> dict[str, float]:
    """The sums over iterations, which are `before` plus the figures of one more iteration."""
    before = before or {}
    return {name: before.get(name, 0.0) + value for name, value in facts.items()}


TOTALS = "ppo/fusion/totals"
LEFT = "samples left"


def record(
    records: RunRecords,
    setting: str | float,
    turn: Turn,
    fusion: StageFusion,
    done: Generated,
    found: StageAccount,
) -> dict[str, float]:
    """Record the fusion of an iteration that ends now. Returns its `fusion_...` metrics. `setting` is
    `spec.plan.interStageFusion`."""
    # If other iterations are open, a server without samples of this one is not idle.
    lane = None if turn.alone else turn.lane
    _on_timeline(records, fusion, done, found, lane)
    _in_metrics(records, fusion, done, found)
    if lane is None:
        for name, seconds in found.idle.items():
            records.metrics.idle_seconds.labels(name).inc(seconds)
    facts = {
        "fusion_migrated": float(len(done.migrations)),
        "fusion_hidden_seconds": found.hidden,
        "fusion_saved_seconds": found.saved,
        "fusion_stage_seconds": found.seconds,
    }
    sums = {"samples_migrated": facts["fusion_migrated"], "seconds_hidden": found.hidden, "seconds_saved": found.saved}
    sums["stage_seconds"] = found.seconds
    decision = fusion.decision
    if decision is not None:
        if decision.threshold is not None:
            facts["fusion_threshold"] = float(decision.threshold)
        facts["fusion_predicted_seconds"] = decision.fused_seconds
        facts["fusion_predicted_saved_seconds"] = decision.serial_seconds - decision.fused_seconds
        sums["predicted_seconds_saved"] = facts["fusion_predicted_saved_seconds"]
        sums["predicted_stage_seconds"] = decision.fused_seconds
    sums = totals(records.store.get(TOTALS), sums)
    records.store.put(TOTALS, sums)
    last = {"threshold": fusion.threshold, "migrated": facts["fusion_migrated"]}
    records.results.fact("fusion", {"setting": setting, **last, **sums})
    records.log("fusion.done", iteration=turn.iteration, **{k: round(v, 4) for k, v in facts.items()})
    return facts


def _on_timeline(
    records: RunRecords, fusion: StageFusion, done: Generated, found: StageAccount, lane: str | None
) -> None:
    timeline = records.timeline
    timeline.count(LEFT if lane is None else f"{LEFT}, {lane}", done.tail)
    if found.overlap is not None:
        args = {"threshold": fusion.threshold, "destinations": ", ".join(fusion.destinations)}
        start, end = found.overlap
        timeline.add([Span(name="overlap", process=COORDINATOR, lane="fusion", start=start, end=end, args=args)])
    timeline.add(
        Span(
            name="migration",
            process=m.destination,
            lane="migrations",
            start=m.ended - m.seconds,
            end=m.ended,
            args={"from": m.source, "mechanism": m.mechanism, "reason": m.reason, "tokens": m.tokens},
        )
        for m in done.migrations
    )


def _in_metrics(records: RunRecords, fusion: StageFusion, done: Generated, found: StageAccount) -> None:
    metrics = records.metrics
    metrics.retries.inc(done.retries)
    for m in done.migrations:
        metrics.migrations.labels(m.mechanism, m.reason).inc()
        metrics.migration_bytes.labels(m.mechanism).inc(m.nbytes)
        metrics.migration_seconds.labels(m.mechanism).observe(m.seconds)
    metrics.fusion_threshold.set(-1 if fusion.threshold is None else fusion.threshold)
    metrics.fusion_seconds.labels("measured").set(found.seconds)
    if fusion.decision is not None:
        metrics.fusion_seconds.labels("predicted").set(fusion.decision.fused_seconds)
        metrics.fusion_seconds.labels("predicted_serial").set(fusion.decision.serial_seconds)
    metrics.hidden_seconds.inc(found.hidden)
