"""Says on the run page whether the run is healthy, and what would make it better. The functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.coordinator.reporting.advice import advice
from dovetail.coordinator.reporting.health import Rules, Verdict, judge
from dovetail.coordinator.reporting.stalls import silent, stalled_phases

Document = dict[str, Any]


def health(
    metrics: Sequence[tuple[int, Mapping[str, float]]],
    times: Sequence[float],
    *,
    rules: Rules,
    lag: int,
    predicted: float | None,
    now: float | None,
) -> Document:
    """The health of a run. `metrics` has (iteration, metrics) of the PPO iterations in order. `times` says when the
    steps of the run were finished. `now` is None for a run that has ended. Both are in seconds since the epoch.

    In the result, `verdicts` are on the last iteration, and on the silence since then. `earlier` has for each earlier
    reason the first and last iteration and their number. `advice` has sentences. It is given only for a healthy run
    that has iterations."""
    judged = _judged(metrics, rules)
    present = judged[-1][1] if judged else []
    if now is not None and (quiet := silent(times, now)) is not None:
        present = [quiet, *present]
    earlier: dict[str, Document] = {}
    for iteration, verdicts in judged:
        for verdict in verdicts:
            known = earlier.setdefault(verdict.reason, {"reason": verdict.reason, "first": iteration, "count": 0})
            known |= {"last": iteration, "count": known["count"] + 1, "message": verdict.message}
    current = {verdict.reason for verdict in present}
    return {
        "iteration": judged[-1][0] if judged else None,
        "verdicts": [verdict.as_json() for verdict in present],
        "earlier": [known for reason, known in earlier.items() if reason not in current],
        "unhealthy": [iteration for iteration, verdicts in judged if verdicts],
        "advice": [] if present else advice([row for _, row in metrics], lag, predicted),
    }


def _judged(metrics: Sequence[tuple[int, Mapping[str, float]]], rules: Rules) -> list[tuple[int, list[Verdict]]]:
    """The verdicts on each iteration. Those on stalls come first."""
    first: Mapping[str, float] = {}
    previous: Mapping[str, float] = {}
    found = []
    for place, (iteration, row) in enumerate(metrics):
        usual = [earlier for _, earlier in metrics[max(0, place - 50) : place + 1]]
        found.append((iteration, [*stalled_phases(usual), *judge(row, first, previous, rules)]))
        if not first and "entropy" in row:
            first = row
        previous = row
    return found
