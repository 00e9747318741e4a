"""Gives advice on how a healthy run could be faster or learn more. It uses the last iterations. The functions are pure.

Advice is given only for healthy runs. If a run learns nothing, its speed does not matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

# Advice uses the means of the last iterations, and needs at least this many. The first iterations load kernels and fill
# caches, so they do not count.
LAST = 10
LEAST = 4
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
    if len(rows) < LEAST:
        return []
    mean = _means(rows[-LAST:])
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
    explained = [row["explained_variance"] for row in rows[-LAST // 2 :] if "explained_variance" in row]
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
