"""Exported schedules, read by a program that knows nothing but the document: an event simulation and a count of what is
held, for any family, shape, latency and limit of memory."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from dovetail.pipelines import (
    CHUNKED,
    FAMILIES,
    ModelPipelines,
    ProblemError,
    ScheduleProblem,
    SearchEffort,
    document,
    find,
    serial_memory,
)

THREE = replace(CHUNKED["fused-v"], name="three chunks", chunks=3)
PLACES = [
    (1, 5, 1, 5),
    (1, 1, 1, 1),
    (1, 2, 1, 2),
    (1, 4, 2, 2),
    (2, 2, 1, 4),
    (1, 6, 3, 2),
    (4, 1, 1, 4),
    (1, 7, 1, 7),
]
KINDS = {"F": ("F",), "B": ("F", "B"), "I": ("F", "I"), "W": ("I",)}


def at(values, pipeline, stage, micro_batch):
    return values if isinstance(values, (int, float)) else values[pipeline][stage][micro_batch]


def read(written):
    """The makespan and the peak memory of a document. Its own times are only used for how a backward is divided."""
    models, mini_batches = {m["name"]: m for m in written["models"]}, written.get("mini_batches", 1)
    sent = written["communication"]
    lists = [
        [((a["model"], a["pipeline"], a["stage"], a["micro_batch"]), a["kind"], a["end"] - a["start"]) for a in mine]
        for mine in written["actions"]
    ]
    seconds = {(*piece, kind): took for mine in lists for piece, kind, took in mine}
    assert len(seconds) == sum(map(len, lists)), "no pass is there twice"
    orders = defaultdict(list)
    for rank, mine in enumerate(lists):
        for (name, pipeline, stage, q), kind, _ in mine:
            assert models[name]["ranks"][pipeline][stage] == rank
            orders[name, pipeline, stage, "B" if kind == "I" else kind].append(q)
    ends_of = defaultdict(list)
    for name, m in models.items():
        for pipeline in range(m["pipelines"]):
            for stage in range(m["stages"]):
                for kind in "FB":
                    assert orders[name, pipeline, stage, kind] == list(range(m["micro_batches"] * mini_batches))
                for q in range(m["micro_batches"] * mini_batches):
                    piece = (name, pipeline, stage, q)
                    last = "W" if (*piece, "W") in seconds else "B"
                    backward = seconds[*piece, last] + (seconds[*piece, "I"] if last == "W" else 0)
                    assert seconds[*piece, "F"] == pytest.approx(at(m["forward"], *piece[1:]), abs=1e-6)
                    assert backward == pytest.approx(at(m["backward"], *piece[1:]), abs=1e-6)
                    ends_of[name, q // m["micro_batches"]].append((*piece, last))

    def needs(piece, kind):
        """The passes that this one waits for, each with the time between."""
        name, pipeline, stage, q = piece
        m = models[name]
        path = m["ranks"][pipeline]

        def from_stage(other):
            onward = kind if (name, pipeline, other, q, kind) in seconds else "BI"[kind == "B"]
            return (name, pipeline, other, q, onward), sent if path[other] != path[stage] else 0.0

        found = [((*piece, before), 0.0) for before in KINDS[kind] if before != kind]
        if kind == "F":
            found += [from_stage(stage - 1)] if stage else []
            for other, its in models.items():
                block = q // m["micro_batches"]
                if other != name and written["coupling"] == "rolled":
                    continue
                after = written["coupling"] == "serial" and (other, name) == tuple(models)
                step = its.get("optimizer_step", 0.0)
                found += [(end, step) for end in ends_of.get((other, block - 1 + after), [])]
        elif kind != "W" and stage + 1 < m["stages"]:
            found.append(from_stage(stage + 1))
        return found

    ended, free, todo = {}, [0.0] * len(lists), [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(lists):
            while todo[rank] < len(mine):
                piece, kind, took = mine[todo[rank]]
                waits = needs(piece, kind)
                if not all(key in ended for key, _ in waits):
                    break
                free[rank] = max([free[rank], *(ended[key] + more for key, more in waits)]) + took
                ended[*piece, kind] = free[rank]
                todo[rank], moved = todo[rank] + 1, True
    assert todo == [len(mine) for mine in lists], "no rank waits for ever"
    peak = 0.0
    for mine in lists:
        held = 0.0
        for (name, *place), kind, _ in mine:
            held += {"F": 1, "I": 0}.get(kind, -1) * at(models[name]["activation"], *place)
            peak = max(peak, held)
    return max(ended.values()), peak


@pytest.mark.slow
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    family=st.sampled_from([THREE, *CHUNKED.values(), *FAMILIES.values()]),
    places=st.sampled_from(PLACES),
    rounds=st.integers(1, 7),
    forwards=st.tuples(st.sampled_from([1.0, 70.0, 1e-9]), st.sampled_from([1.0, 8.0])),
    weights=st.sampled_from([None, 1e-9, 0.999]),
    latency=st.sampled_from([0.0, 0.05, 10.0, 1000.0]),
    mini_batches=st.sampled_from([1, 1, 2, 3]),
    step=st.sampled_from([0.0, 2.5]),
    limited=st.booleans(),
    ragged=st.none() | st.integers(0, 9),
)
def test_any_schedule_is_what_its_document_says(
    family, places, rounds, forwards, weights, latency, mini_batches, step, limited, ragged
):
    """Stages whose passes take next to no time, weight gradients that do, unlike models, one stage, fewer micro-batches
    than stages."""
    together = math.lcm(*places[::2]) * rounds
    models = []
    for name, pipelines, stages, forward in zip(("a", "c"), places[::2], places[1::2], forwards, strict=True):
        count = together // pipelines
        times = np.full((pipelines, stages, count * mini_batches), forward * pipelines)
        if ragged is not None:
            times *= np.random.default_rng(ragged).uniform(0.2, 2, times.shape)
        first = None if weights is None else 2 * times * (1 - weights)
        models.append(ModelPipelines(name, stages, count, times, 2 * times, forward, pipelines, first, None, step))
    problem = ScheduleProblem((models[0], models[1]), latency, mini_batches)
    if limited:
        problem = replace(problem, memory_limit=max(serial_memory(problem), problem.least_memory_of(1, False)))
    note(str(problem))
    try:
        found = find(problem, family, SearchEffort(seconds=0, scale=0.01, workers=1, memory=False, exact=False))
    except ProblemError:
        if limited:
            return
        raise
    written = json.loads(json.dumps(document(found), allow_nan=False))
    makespan, peak = read(written)
    assert makespan == pytest.approx(written["makespan"], rel=1e-9)
    assert peak == pytest.approx(written["peak"], rel=1e-9)
    assert written["bound"] <= makespan * (1 + 1e-9)
    assert problem.memory_limit is None or peak <= problem.memory_limit * (1 + 1e-9)
