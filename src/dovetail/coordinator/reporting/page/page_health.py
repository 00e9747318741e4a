"""Says on the run page whether the run is healthy: its verdicts, phases that take far longer than before, and, for a
healthy run only, advice on speed and learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from dovetail.coordinator.reporting.health import Rules, Verdict, judge

# Advice uses the means of the last iterations, and needs at least this many. The first iterations load kernels and fill
# caches, so they do not count.
LAST_ITERATIONS = 10
LEAST_ITERATIONS = 4
BUSY_SHARE = 0.6
WAITING_SHARE = 0.15
MOVING_SHARE = 0.15
CUT_SHARE = 0.1
CLIPPED = 0.4
MOVED_NATS = 0.1
PLAN_FACTOR = 1.25
CRITIC_ITERATIONS = 10


def advice(rows: Sequence[Mapping[str, float]], lag: int = 0, predicted: float | None = None) -> list[str]:
    """Sentences, at most one for each subject. `rows` has the metrics of the PPO iterations. `lag` is spec.ppo.lag.
    `predicted` is the seconds of an iteration in the plan."""
    if len(rows) < LEAST_ITERATIONS:
        return []
    mean = _means(rows[-LAST_ITERATIONS:])
    seconds = mean.get("iteration_seconds", 0.0)
    found = _time(mean, seconds, lag) if seconds > 0 else []
    if predicted and seconds > PLAN_FACTOR * predicted:
        found.append(
            f"An iteration takes {seconds:.3g} s and the plan says {predicted:.3g} s: measure this hardware with "
            "dovetail profile, so that the next plan fits it."
        )
    if (finished := mean.get("finished_fraction", 1.0)) < 1 - CUT_SHARE:
        found.append(
            f"{1 - finished:.0%} of the responses are cut at generation.maxTokens: raise it, or give "
            "ppo.missingEosPenalty."
        )
    if (clipped := mean.get("clipfrac", 0.0)) > CLIPPED or mean.get("approx_kl", 0.0) > MOVED_NATS:
        found.append(
            f"The steps of an iteration move the policy far ({clipped:.0%} of the tokens are clipped): lower "
            "ppo.actorOptimizer.learningRate or ppo.epochs."
        )
    explained = [row["explained_variance"] for row in rows[-LAST_ITERATIONS // 2 :] if "explained_variance" in row]
    if len(rows) >= CRITIC_ITERATIONS and explained and max(explained) < 0:
        found.append(
            "The critic predicts returns worse than their mean would: raise ppo.criticOptimizer.learningRate, or give "
            "ppo.criticWarmupIterations."
        )
    return found


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: fmean(found) for name, found in values.items() if found}


def _time(mean: Mapping[str, float], seconds: float, lag: int) -> list[str]:
    """Advice about the phase that takes most of an iteration."""
    share = {name: mean.get(f"seconds_{name}", 0.0) / seconds for name in ("generation", "training", "waiting")}
    moving = mean.get("seconds_weights", 0.0) / seconds
    found = []
    if lag and share["waiting"] > WAITING_SHARE:
        found.append(f"The trainers wait for samples in {share['waiting']:.0%} of the time: add rollouts.")
    elif not lag and share["generation"] > BUSY_SHARE:
        found.append(
            f"Generation takes {share['generation']:.0%} of an iteration, and the trainers wait meanwhile: add "
            "rollouts, or let both overlap with ppo.lag: 1."
        )
    elif not lag and share["training"] > BUSY_SHARE:
        found.append(
            f"Training takes {share['training']:.0%} of an iteration, and the rollouts wait meanwhile: add trainer "
            "ranks, or let both overlap with ppo.lag: 1."
        )
    if moving > MOVING_SHARE:
        found.append(
            f"Sending weights takes {moving:.0%} of an iteration: give the nodes a faster network, or train more "
            "samples in an iteration with ppo.globalBatchSize."
        )
    return found


PHASE_STALLED = "PhaseStalled"
RUN_SILENT = "RunSilent"
# A phase stalls if it takes this many times its median, and also this many seconds more.
STALL_FACTOR = 6.0
LEAST_SECONDS = 1.0
# The median of fewer iterations says little.
KNOWN_ITERATIONS = 3
SILENT_SECONDS = 60.0
SECONDS_PREFIX = "seconds_"


def stalled_phases(rows: Sequence[Mapping[str, float]]) -> list[Verdict]:
    """Verdicts on the phases of the last row that took STALL_FACTOR times their median in the rows before it."""
    *before, last = rows or ({},)
    found = []
    for name, seconds in last.items():
        if not name.startswith(SECONDS_PREFIX) or seconds is None:
            continue
        usual = [row[name] for row in before if row.get(name) is not None]
        if len(usual) < KNOWN_ITERATIONS:
            continue
        middle = median(usual)
        if middle > 0 and seconds > STALL_FACTOR * middle and seconds - middle > LEAST_SECONDS:
            phase = name.removeprefix(SECONDS_PREFIX)
            found.append(
                Verdict(
                    PHASE_STALLED,
                    f"{phase} stalled: it took {seconds:.3g} s, {seconds / middle:.3g} times its median of "
                    f"{middle:.3g} s; the timeline of this iteration shows which process was late",
                )
            )
    return found


def silent(times: Sequence[float], now: float) -> Verdict | None:
    """A verdict if a running job has finished no step for a long time. `times` says when its steps were finished.
    `times` and `now` are in seconds since the epoch."""
    gaps = [after - before for before, after in pairwise(times)]
    if len(gaps) < KNOWN_ITERATIONS:
        return None
    usual, since = median(gaps[-20:]), now - times[-1]
    if since <= max(SILENT_SECONDS, STALL_FACTOR * usual):
        return None
    return Verdict(
        RUN_SILENT,
        f"no step has ended for {since:.0f} s, {since / usual if usual > 0 else 0:.3g} times the median of {usual:.3g} "
        "s; look at the newest events, and at the logs of the process that is named there",
    )


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
