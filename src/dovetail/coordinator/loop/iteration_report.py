"""Records a finished iteration: its metrics, its row of history, its times, and the verdicts on it. It is compared with
the plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.job import Job
from dovetail.coordinator.reporting.health import HealthWatch, Verdict
from dovetail.coordinator.reporting.results import mean_ci95
from dovetail.manifest.types import Stage
from dovetail.protocol import clock
from dovetail.protocol.experience import kl_per_sample
from dovetail.protocol.messages import CommandResult
from dovetail.protocol.prediction import MEASURED_NAMES
from dovetail.protocol.wire import Array, unpack


def iteration_metrics(arrays: Mapping[str, Array], trained: Mapping[str, float], lag: int = 0) -> dict[str, float]:
    """One row of history.jsonl without the times. It has rewards, KL (nats), response lengths (tokens) and the
    trainers' own metrics. A sample without a token, such as a discarded episode, counts nowhere but in `samples`."""
    there = arrays["response_lengths"].astype(np.int64) > 0
    scores = arrays["scores"][there].tolist()
    reward, kl = mean_ci95(scores), mean_kl(arrays, trained, lag)
    distance = {} if kl is None else {"kl": kl["mean"], "kl_ci95": kl["ci95"]}
    lengths = arrays["response_lengths"][there].astype(np.float64)
    return {
        **trained,
        "samples": float(len(there)),
        "reward": reward["mean"],
        "reward_ci95": reward["ci95"],
        "reward_min": min(scores),
        "reward_max": max(scores),
        "equal_reward_groups": equal_groups(arrays),
        "distinct_responses": float(distinct_responses(arrays)),
        **distance,
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "finished_fraction": float(arrays["finished"][there].astype(np.float64).mean()),
    }


def times(samples: int, phases: Mapping[str, float], wall_seconds: float | None) -> dict[str, float]:
    """The times of a row of history.jsonl. {} if nobody knows how long the iteration took."""
    if wall_seconds is None:
        return {}
    whole = {"samples_per_second": samples / wall_seconds, "iteration_seconds": wall_seconds}
    return whole | {f"seconds_{name}": seconds for name, seconds in phases.items()}


def mean_kl(arrays: Mapping[str, Array], trained: Mapping[str, float], lag: int = 0) -> dict[str, float] | None:
    """The mean KL to the reference per sample, in nats, and the half-width of its 95% interval. None without a
    reference. With a lag the trainers' KL is used, because the rollouts' log-probabilities are of older weights. The
    trainers' KL is that of the weights with which the iteration's training begins."""
    if lag > 0 and "kl" in trained:
        return {"mean": trained["kl"], "ci95": trained.get("kl_ci95", 0.0)}
    found = kl_per_sample(arrays)
    return None if found is None else mean_ci95(found[arrays["response_lengths"].astype(np.int64) > 0].tolist())


def distinct_responses(arrays: Mapping[str, Array]) -> int:
    """The number of different responses, compared by their tokens."""
    begin, length = arrays["prompt_lengths"].tolist(), arrays["response_lengths"].tolist()
    rows = zip(arrays["tokens"], begin, length, strict=True)
    return len({np.ascontiguousarray(row[first : first + count]).tobytes() for row, first, count in rows if count})


def equal_groups(arrays: Mapping[str, Array]) -> float:
    """The fraction of the prompts with several samples whose samples all have the same score, and whose steps, if there
    are any, all have the same reward. It is 0 if there are no such prompts."""
    _, group, sizes = np.unique(arrays["groups"], return_inverse=True, return_counts=True)
    several = sizes > 1
    same = _equal(group, arrays["scores"], len(sizes))
    if "step_ends" in arrays:
        rows, columns = np.nonzero(arrays["step_ends"])
        same &= _equal(group[rows], arrays["step_rewards"][rows, columns], len(sizes))
    return float(same[several].mean()) if several.any() else 0.0


def _equal(group: NDArray[np.intp], values: NDArray[Any], groups: int) -> NDArray[np.bool_]:
    """Whether all values of a group are equal, for each group, as (groups,) bool. `group` and `values` are (n,)."""
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    found: NDArray[np.bool_] = low >= high
    return found


def with_other(phases: Mapping[str, float], wall: float, lag: int = 0) -> dict[str, float]:
    """The seconds of an iteration's phases, with those that belong to none of them as `other`. With a lag, only its
    training and the wait for its samples belong to the time between two steps. The other phases ran beside."""
    own = (phases.get(name, 0.0) for name in ("waiting", "training")) if lag else phases.values()
    return {**phases, "other": max(0.0, wall - sum(own))}


def one_after_the_other(phases: Mapping[str, float]) -> float:
    """The seconds that an iteration with a lag would take if its phases followed each other. Time that the trainers
    wait is left out, because they would not wait then."""
    return sum(seconds for name, seconds in phases.items() if name != "waiting")


# A plan is wrong when ITERATIONS iterations in a row differ from the expected time by more than the fraction TOLERANCE.
# It is right again when as many in a row do not differ.
TOLERANCE = 0.25
ITERATIONS = 3


@dataclass(frozen=True)
class Expected:
    """The expected seconds of an iteration and of each phase, by the coordinator's phase names. `measured` says whether
    they come from measurements and not from the plan."""

    seconds: float
    phases: Mapping[str, float]
    measured: bool = False

    @classmethod
    def predicted(cls, seconds: float, phases: Mapping[str, float]) -> Expected:
        """The expectation from a plan's prediction, in seconds."""
        return cls(seconds, {MEASURED_NAMES.get(name, name): value for name, value in phases.items()})


def off(expected: float, measured: float, tolerance: float = TOLERANCE) -> bool:
    """Whether an iteration of `measured` seconds differs from `expected` seconds by more than the fraction
    `tolerance`."""
    return abs(measured - expected) > tolerance * expected


class PlanCheck:
    """Compares each iteration with the expected time. After ITERATIONS wrong ones in a row, their median becomes the
    expected time. `problem` then says what was wrong, until as many iterations in a row take the expected time."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.problem: str | None = None
        self._recent: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=ITERATIONS)

    def observe(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Record that an iteration took `seconds` seconds. `phases` has the seconds of each phase."""
        wrong = off(self.expected.seconds, seconds)
        if self._recent and wrong != off(self.expected.seconds, self._recent[-1][0]):
            self._recent.clear()
        self._recent.append((seconds, phases))
        if len(self._recent) < ITERATIONS:
            return
        if wrong:
            found = Expected(
                median(s for s, _ in self._recent),
                {name: median(p.get(name, 0.0) for _, p in self._recent) for name in phases},
                measured=True,
            )
            self.problem = sentence(self.expected, found)
            self.expected = found
            self._recent.clear()
        else:
            self.problem = None


def sentence(expected: Expected, found: Expected) -> str:
    """One sentence that says by how much the times differ, and in which phase most."""
    change = found.seconds / expected.seconds - 1 if expected.seconds else float("inf")
    said = "measured before" if expected.measured else "predicted"
    text = (
        f"an iteration takes {found.seconds:.3g} s, {abs(change):.0%} {'more' if change > 0 else 'less'} than the "
        f"{expected.seconds:.3g} s {said}"
    )
    gaps = {name: found.phases.get(name, 0.0) - expected.phases.get(name, 0.0) for name in found.phases}
    if gaps:
        most = max(gaps, key=lambda name: abs(gaps[name]))
        before, now = expected.phases.get(most, 0.0), found.phases.get(most, 0.0)
        text += f", most of it in {most}: {now:.3g} s instead of {before:.3g} s"
    return f"{text}; the measured times are expected from now on"


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
