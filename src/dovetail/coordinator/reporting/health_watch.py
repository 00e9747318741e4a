"""Judges each iteration's health, and writes it to the store, the log, the metrics and the status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Gauge

from dovetail.coordinator.reporting.health import REASONS, Rules, UnhealthyError, Verdict, judge
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RLHFJobSpec

FACT = "fact/health"  # the store's key of what summary.json says
TREND = ("entropy", "kl", "response_length")


class HealthWatch:
    """First `judge` an iteration, and then `note` the verdicts. The state is in the store. So a restart changes no
    verdict, and an iteration that is noted twice counts once.

    The summary's fact has the number of `iterations` judged, how many of them were `unhealthy`, and the last verdicts.
    For each reason it has the `first` and `last` iteration, their `count` and the last `message`."""

    def __init__(self, spec: RLHFJobSpec, store: Store, log: Callable[..., None], gauge: Gauge) -> None:
        self._rules = Rules.of(spec)
        self._stop = spec.failure_policy.on_unhealthy == "Stop"
        self._store = store
        self._log = log
        self._gauge = gauge
        for reason in REASONS:
            gauge.labels(reason).set(0)

    def judge(self, iteration: int, metrics: Mapping[str, float]) -> list[Verdict]:
        """Judge the iteration. Returns the verdicts, the worst first. It stores nothing."""
        before = self._trend(iteration)
        return judge(metrics, before["first"], before["previous"], self._rules)

    def note(self, iteration: int, metrics: Mapping[str, float], verdicts: list[Verdict]) -> dict[str, Any]:
        """Store the verdicts, and log those that are new. Returns the field `health` of the status."""
        fact = self._store.get(FACT) or {"iterations": 0, "unhealthy": 0, "verdicts": [], "reasons": {}}
        earlier = {entry["reason"] for entry in fact["verdicts"]}
        for verdict in verdicts:
            if verdict.reason not in earlier:
                self._log("health.unhealthy", iteration=iteration, **verdict.as_json())
        now = {verdict.reason for verdict in verdicts}
        for reason in sorted(earlier - now):
            self._log("health.recovered", iteration=iteration, reason=reason)
        again = iteration <= fact["iterations"]
        fact["iterations"] = max(iteration, fact["iterations"])
        fact["unhealthy"] += bool(verdicts) and not again
        fact["verdicts"] = [{"iteration": iteration, **verdict.as_json()} for verdict in verdicts]
        for verdict in verdicts:
            known = fact["reasons"].setdefault(verdict.reason, {"first": iteration, "last": 0, "count": 0})
            known["count"] += iteration > known["last"]
            known |= {"last": max(iteration, known["last"]), "message": verdict.message}
        row = {name: metrics[name] for name in TREND if name in metrics}
        trend = self._trend(iteration)
        first = trend["first"] or (row if "entropy" in row else {})
        self._store.put_all(
            {FACT: fact, "health/trend": {"first": first, "previous": trend["previous"], "last": [iteration, row]}}
        )
        for reason in REASONS:
            self._gauge.labels(reason).set(reason in now)
        return {"iteration": iteration, "verdicts": [verdict.as_json() for verdict in verdicts]}

    def status(self) -> dict[str, Any]:
        """The field `health` of the status after a restart. It is that of the last iteration, and empty before the
        first."""
        fact = self._store.get(FACT)
        if not fact:
            return {}
        told = [{"reason": v["reason"], "message": v["message"]} for v in fact["verdicts"]]
        for verdict in told:
            self._gauge.labels(verdict["reason"]).set(1)
        return {"iteration": fact["iterations"], "verdicts": told}

    def check(self, iteration: int, verdicts: list[Verdict]) -> None:
        """Raises UnhealthyError if the run must end."""
        worst = next((v for v in verdicts if v.stops), None)
        if worst is not None:
            raise UnhealthyError(
                f"iteration {iteration} is stopped and does not count ({worst.reason}): {worst.message}"
            )
        if verdicts and self._stop:
            raise UnhealthyError(
                f"iteration {iteration} is unhealthy and failurePolicy.onUnhealthy is Stop ({verdicts[0].reason}): "
                f"{verdicts[0].message}"
            )

    def _trend(self, iteration: int) -> dict[str, Any]:
        """The rows of the first iteration and of the one before `iteration`, even if `iteration` is already noted."""
        trend = self._store.get("health/trend") or {"first": {}, "previous": {}, "last": [0, {}]}
        noted, last = trend["last"]
        return {"first": trend["first"], "previous": last if noted < iteration else trend["previous"]}
