"""Records a finished iteration: its row of history, its times, and the verdicts on it. It is compared with the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dovetail.coordinator.job import Job
from dovetail.coordinator.loop.iteration_metrics import iteration_metrics, one_after_the_other, times, with_other
from dovetail.coordinator.loop.plan_check import Expected, PlanCheck
from dovetail.coordinator.reporting.health import Verdict
from dovetail.coordinator.reporting.health_watch import HealthWatch
from dovetail.coordinator.reporting.summary import mean_ci95
from dovetail.manifest.types import Stage
from dovetail.protocol import clock
from dovetail.protocol.messages import CommandResult
from dovetail.protocol.wire import Array, unpack


class IterationReport:
    """Call `begin` before the first iteration of this process."""

    def __init__(self, job: Job) -> None:
        self._spec, self._records = job.spec, job.records
        self._verdicts: list[Verdict] = []
        self._check: PlanCheck | None = None
        if (predicted := job.plan.prediction) is not None and predicted.lag == job.spec.ppo.lag:
            self._check = PlanCheck(Expected.predicted(predicted.iteration_seconds, predicted.phases))

    def begin(self) -> None:
        records = self._records
        self._health = HealthWatch(self._spec, records.store, records.log, records.metrics.unhealthy)
        records.progress.update(health=self._health.status())

    def measured(self, arrays: Mapping[str, Array], result: CommandResult) -> dict[str, float]:
        """The iteration's metrics without its times."""
        return iteration_metrics(arrays, result.metrics, self._spec.ppo.lag)

    def untrue(self, iteration: int, metrics: dict[str, float]) -> list[Verdict]:
        """The verdicts that say that this iteration's result cannot be trusted. They are recorded."""
        found = [v for v in self._health.judge(iteration, metrics) if v.stops]
        if found:
            self._records.history.add(Stage.PPO, iteration, metrics)
            self._records.progress.update(metrics=metrics, health=self._health.note(iteration, metrics, found))
        return found

    def check(self, iteration: int, verdicts: list[Verdict] | None = None) -> None:
        """Raise UnhealthyError if the run must end because of these verdicts, or of those of the last `close`."""
        self._health.check(iteration, self._verdicts if verdicts is None else verdicts)

    def close(
        self, iteration: int, arrays: Mapping[str, Array], measured: Mapping[str, float], facts: Mapping[str, float]
    ) -> dict[str, float]:
        """Record a finished iteration with its times and these further `facts`, and begin the next one. Returns its
        metrics."""
        records, timeline = self._records, self._records.timeline
        wall = clock.now() - timeline.started
        phases = with_other(timeline.of(iteration), wall, self._spec.ppo.lag)
        timeline.forget_through(iteration)
        one_by_one = one_after_the_other(phases) if self._spec.ppo.lag else None
        records.results.add_iteration(len(arrays["scores"]), wall, phases, one_by_one)
        more = {**facts, **({} if one_by_one is None else {"synchronous_seconds": one_by_one})}
        metrics = self._record(iteration, arrays, {**measured, **times(len(arrays["scores"]), phases, wall), **more})
        gauges = records.metrics
        for name, seconds in phases.items():
            gauges.phase_seconds.labels(name).inc(seconds)
        gauges.iteration_seconds.observe(wall)
        # With a lag, the trainers wait for the first samples, and in the last iterations no samples are left to draw.
        lag, last = self._spec.ppo.lag, self._spec.ppo.iterations
        if lag < iteration <= last - lag:
            self._compare(wall, phases)
        gauges.rate.set(metrics["samples_per_second"])
        timeline.write(iteration)
        timeline.begin()
        return metrics

    def close_interrupted(self, iteration: int, result: CommandResult) -> None:
        """Record an iteration without its times, if the coordinator died before it had recorded it."""
        if iteration == 0 or (self._records.store.get("ppo/recorded") or 0) >= iteration:
            return
        arrays = unpack(self._records.batches.read(iteration))
        self._record(iteration, arrays, self.measured(arrays, result))

    def _compare(self, wall: float, phases: Mapping[str, float]) -> None:
        """Report when iterations take longer or shorter than the plan says, and how long the next one should take."""
        if (check := self._check) is None:
            return
        before = check.problem
        check.observe(wall, phases)
        if check.problem is not None and check.problem != before:
            self._records.log("plan.off", problem=check.problem)
        told = {"expected_iteration_seconds": check.expected.seconds, "problem": check.problem}
        self._records.progress.update(plan=told)

    def _record(self, iteration: int, arrays: Mapping[str, Array], metrics: dict[str, float]) -> dict[str, float]:
        """Record the iteration's row of history, its facts and its gauges. Returns its metrics."""
        records = self._records
        records.history.add(Stage.PPO, iteration, metrics)
        for when in ["first"] * (iteration == 1) + ["last"]:
            records.results.fact(f"ppo.reward_{when}", mean_ci95(arrays["scores"].tolist()))
            if "kl" in metrics:
                records.results.fact(f"ppo.kl_{when}", {"mean": metrics["kl"], "ci95": metrics["kl_ci95"]})
        self._verdicts = self._health.judge(iteration, metrics)
        health = self._health.note(iteration, metrics, self._verdicts)
        gauges = records.metrics
        gauges.reward.set(metrics["reward"])
        gauges.kl.set(metrics.get("kl", math.nan))
        gauges.stage_step.labels("ppo").set(iteration)
        gauges.steps.labels("ppo").inc()
        records.progress.update(iteration=iteration, metrics=metrics, phase=None, health=health)
        told = {"health": ", ".join(v.reason for v in self._verdicts) or "healthy"}
        records.log("iteration.finished", iteration=iteration, **told, **{k: round(v, 5) for k, v in metrics.items()})
        records.store.put("ppo/recorded", iteration)
        return metrics
