"""Records the inter-stage fusion of an iteration in metrics, timeline, summary and history."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.samples.fusion.account import StageAccount, account, totals
from dovetail.coordinator.samples.fusion.fusion import StageFusion
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.lineup import Turn
from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import COORDINATOR, rollout_of

TOTALS = "ppo/fusion/totals"
LEFT = "samples left"


def record(
    records: RunRecords,
    setting: str | float,
    scorers: int,
    turn: Turn,
    fusion: StageFusion,
    done: Generated,
    begun: float,
    generated: float,
    scoring: Sequence[Span],
) -> dict[str, float]:
    """Record the fusion of an iteration that ends now. Returns its `fusion_...` metrics.

    `setting` is `spec.plan.interStageFusion`, and `scorers` is the number of scorers. The stage began at `begun`, and
    its last sample was generated at `generated`, in seconds since the epoch. `scoring` has one span for each scored
    batch."""
    # If other iterations are open, a server without samples of this one is not idle.
    lane = None if turn.alone else turn.lane
    by_rollout: dict[str, list[Span]] = {}
    for span in scoring:
        by_rollout.setdefault(rollout_of(span.process), []).append(span)
    found = account(begun, generated, time.time(), done.spans, by_rollout, scorers)
    _on_timeline(records, fusion, done, by_rollout, generated, lane)
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
    records: RunRecords,
    fusion: StageFusion,
    done: Generated,
    by_rollout: dict[str, list[Span]],
    generated: float,
    lane: str | None,
) -> None:
    timeline = records.timeline
    timeline.count(LEFT if lane is None else f"{LEFT}, {lane}", done.tail)
    early = [s.start for spans in by_rollout.values() for s in spans if s.start < generated]
    if early:
        args = {"threshold": fusion.threshold, "destinations": ", ".join(fusion.destinations)}
        start = min(early)
        span = Span(name="overlap", process=COORDINATOR, lane="fusion", start=start, end=generated, args=args)
        timeline.add([span])
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
