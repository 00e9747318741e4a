"""Writes a schedule as a JSON document."""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.pipelines.schedule import Schedule


def document(schedule: Schedule) -> dict[str, Any]:
    """The document that `dovetail schedule -o` writes.

    A model's `stages` is the number of stages in a pipeline. `ranks` names each stage's rank, by pipeline. With two
    chunks per rank, it names each rank twice. Times and sizes describe one stage. They are one number if they are
    uniform, and otherwise a list by pipeline, stage and micro-batch. A model's `micro_batches` counts the micro-batches
    of one pipeline and mini-batch. The numbers of actions count through all mini-batches. `coupling` says what a
    mini-batch's first forwards wait for, in addition to their own model's optimizer step (`Coupling`).
    `optimizer_step` is given if it takes time."""
    problem, placement = schedule.instance.problem, schedule.instance.placement
    models = []
    for index, m in enumerate(problem.models):
        entry: dict[str, Any] = {"name": m.name, "pipelines": m.pipelines, "stages": m.stages * placement.chunks}
        entry["ranks"] = [placement.path(problem, index, k) for k in range(m.pipelines)]
        if m.first:
            entry["first_rank"] = m.first
        entry["micro_batches"] = m.micro_batches
        for field in ("forward", "backward", "activation"):
            values = problem.along(index, field, placement.chunks)
            uniform = bool((values == values.flat[0]).all())
            entry[field] = _number(values.flat[0]) if uniform else values.tolist()
        if m.optimizer_step:
            entry["optimizer_step"] = _number(m.optimizer_step)
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
        "coupling": schedule.instance.coupling.value,
        "makespan": _number(schedule.makespan),
        "bound": _number(schedule.bound),
        "peak": _number(schedule.peak),
        "actions": actions,
    }


def _number(value: float) -> float | int:
    value = float(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
