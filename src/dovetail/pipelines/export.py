"""Schedules as JSON documents and as words, and the key under which a search's answer is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import numpy as np

from dovetail.pipelines.families import family_instance, family_of
from dovetail.pipelines.problem import Problem
from dovetail.pipelines.schedule import DeadlockError, Schedule, evaluate
from dovetail.pipelines.search import Effort, find

VERSION = 2  # of the search: answers kept by an older one are not used


def document(schedule: Schedule) -> dict[str, Any]:
    """What `dovetail schedule -o` writes. Times and sizes of a model are one number where they are uniform, else a list
    per pipeline, stage and micro-batch. `micro_batches` is per pipeline and mini-batch; actions count through all."""
    problem = schedule.instance.problem
    models = []
    for index, m in enumerate(problem.models):
        entry: dict[str, Any] = {"name": m.name, "pipelines": m.pipelines, "stages": m.stages}
        if m.first:
            entry["first_rank"] = m.first
        entry["micro_batches"] = m.micro_batches
        for field in ("forward", "backward", "activation"):
            values = problem.array(index, field)[m.ranks.start : m.ranks.stop]
            uniform = bool((values == values.flat[0]).all())
            entry[field] = _number(values.flat[0]) if uniform else values.reshape(m.pipelines, m.stages, -1).tolist()
        models.append(entry)
    actions: list[list[dict[str, Any]]] = [[] for _ in range(problem.ranks)]
    for p in schedule.passes():
        row = {"model": p.model, "pipeline": p.pipeline, "stage": p.stage, "micro_batch": p.micro_batch}
        actions[p.rank].append({**row, "kind": p.kind, "start": _number(p.start), "end": _number(p.end)})
    result: dict[str, Any] = {"ranks": problem.ranks, "models": models}
    edges = problem.latencies
    uniform = np.ndim(problem.communication) == 0
    result["communication"] = _number(edges.flat[0]) if uniform else edges.tolist()
    if problem.mini_batches > 1:
        result["mini_batches"] = problem.mini_batches
    return {
        **result,
        "family": schedule.family,
        "makespan": _number(schedule.makespan),
        "bound": _number(schedule.bound),
        "peak": _number(schedule.peak),
        "actions": actions,
    }


def _number(value: float) -> float | int:
    value = float(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def cached_find(problem: Problem, family: str, effort: Effort, store: MutableMapping[str, str]) -> Schedule:
    """`find`, with the answer kept in `store` under a hash of problem, family and effort. A kept answer is evaluated
    anew, so a damaged or foreign entry is noticed and searched for again."""
    if family_of(family).fixed:
        return find(problem, family_of(family), effort)
    key = hashlib.sha256(
        json.dumps([VERSION, problem.digest, family, effort.seed, effort.seconds, effort.scale, effort.memory]).encode()
    ).hexdigest()
    kept = store.get(key)
    if kept is not None:
        try:
            entry = json.loads(kept)
            instance = family_instance(problem, family_of(family))
            words = np.array(entry["words"], dtype=np.int64)
            counts = np.array([np.bincount(w, minlength=6) for w in words])
            if words.shape == (instance.ranks, instance.length) and (counts.max(0) == counts.min(0)).all():
                found = evaluate(instance, words, family, str(entry["how"]))
                if found.peaks.min() >= 0 and abs(found.makespan - entry["makespan"]) <= 1e-6 * found.makespan:
                    return replace(found, seed=effort.seed)
        except (ValueError, KeyError, TypeError, DeadlockError):
            pass
    found = find(problem, family_of(family), effort)
    store[key] = json.dumps({"words": found.words.tolist(), "how": found.how, "makespan": found.makespan})
    return found
