"""Computes the metrics of one PPO iteration, which are statistics of rewards, KL and responses. The functions are
pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.reporting.summary import mean_ci95
from dovetail.protocol.experience import kl_per_sample
from dovetail.protocol.wire import Array


def iteration_metrics(arrays: Mapping[str, Array], trained: Mapping[str, float], lag: int = 0) -> dict[str, float]:
    """One row of history.jsonl without the times. It has rewards, KL (nats), response lengths (tokens) and the
    trainers' own metrics."""
    scores = arrays["scores"].tolist()
    reward, kl = mean_ci95(scores), mean_kl(arrays, trained, lag)
    distance = {} if kl is None else {"kl": kl["mean"], "kl_ci95": kl["ci95"]}
    lengths = arrays["response_lengths"].astype(np.float64)
    return {
        **trained,
        "samples": float(len(scores)),
        "reward": reward["mean"],
        "reward_ci95": reward["ci95"],
        "reward_min": min(scores),
        "reward_max": max(scores),
        "equal_reward_groups": equal_groups(arrays),
        "distinct_responses": float(distinct_responses(arrays)),
        **distance,
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "finished_fraction": float(arrays["finished"].astype(np.float64).mean()),
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
    return None if found is None else mean_ci95(found.tolist())


def distinct_responses(arrays: Mapping[str, Array]) -> int:
    """The number of different responses, compared by their tokens."""
    begin, length = arrays["prompt_lengths"].tolist(), arrays["response_lengths"].tolist()
    rows = zip(arrays["tokens"], begin, length, strict=True)
    return len({np.ascontiguousarray(row[first : first + count]).tobytes() for row, first, count in rows})


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
