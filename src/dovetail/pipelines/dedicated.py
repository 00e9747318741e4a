"""Each model on ranks of its own, both at once (PUZZLE section 3: single-model-dedicated-device; APP: interleaving).

Neither waits for the other, so 1F1B is the best there is of whole backwards; what is to choose is the division."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dovetail.pipelines.families import DEDICATED, family_instance, one_f_one_b
from dovetail.pipelines.instance import KINDS
from dovetail.pipelines.problem import Model, Problem, ProblemError
from dovetail.pipelines.schedule import Schedule, evaluate


def dedicated(problem: Problem) -> Schedule:
    """The fastest division of the ranks of a shared problem within its memory limit.

    Each model has one pipeline, its layers cut evenly, in the time of its mean micro-batch. Raises ProblemError where
    no division fits."""
    found = []
    for actor in range(1, problem.ranks):
        try:
            found.append(dedicated_schedule(_divided(problem, actor)))
        except ProblemError:
            continue
    if not found:
        raise ProblemError(
            f"actor and critic do not fit on ranks of their own: {problem.ranks} ranks"
            + ("" if problem.memory_limit is None else f", each with {problem.memory_limit:g} for activations")
        )
    return min(found, key=lambda s: (round(s.makespan, 9), s.peak))


def dedicated_schedule(problem: Problem) -> Schedule:
    """1F1B of both models of a problem in which each has ranks of its own. Raises ProblemError above the memory
    limit."""
    instance = family_instance(problem, DEDICATED)
    parts = [_alone(problem, index) for index in (0, 1)]
    words = np.full((problem.ranks, max(p.words.shape[1] for p in parts)), -1, dtype=np.int64)
    finish = np.zeros_like(instance.duration)
    for index, (m, part) in enumerate(zip(problem.models, parts, strict=True)):
        own = slice(m.ranks.start, m.ranks.stop)
        words[own, : part.words.shape[1]] = part.words + KINDS * index
        count = int(instance.total[index])
        finish[index, :, own, :count] = part.finish[0, :, :, :count]
    peaks = np.concatenate([part.peaks for part in parts])
    limit = problem.memory_limit
    if limit is not None and peaks.max() > limit * (1 + 1e-9):
        raise ProblemError(
            f"with ranks of their own the models need {peaks.max():g} of activation memory, the limit is {limit:g}"
        )
    return Schedule(DEDICATED.name, instance, words, finish, max(part.makespan for part in parts), peaks)


def _alone(problem: Problem, index: int) -> Schedule:
    """One model's 1F1B on its own ranks, as model 0 of an instance whose other model does nothing."""
    m = replace(problem.models[index], first=0)
    own = problem.models[index].ranks
    edges = problem.latencies[own.start : own.stop, own.start : own.stop]
    instance = family_instance(Problem((m, replace(m, name="nothing")), edges, problem.mini_batches), DEDICATED)
    words = [
        [code for _ in range(problem.mini_batches) for code in one_f_one_b(instance, rank, 0)]
        for rank in range(len(own))
    ]
    return evaluate(instance, np.array(words, dtype=np.int64), DEDICATED.name)


def _divided(problem: Problem, actor: int) -> Problem:
    """The problem with the first `actor` ranks for the actor alone, the others for the critic."""
    latency = float(problem.latencies.max())
    models = []
    for index, ranks in enumerate((actor, problem.ranks - actor)):
        m = problem.models[index]
        count = m.micro_batches * m.pipelines * problem.mini_batches

        def mean(field: str, m: Model = m, index: int = index, ranks: int = ranks, count: int = count) -> float:
            return float(problem.array(index, field).sum()) / count / ranks

        models.append(
            Model(
                m.name,
                ranks,
                m.micro_batches * m.pipelines,
                mean("forward"),
                mean("backward"),
                mean("activation"),
                optimizer_step=m.optimizer_step,
                first=0 if index == 0 else actor,
            )
        )
    return Problem((models[0], models[1]), latency, problem.mini_batches, problem.memory_limit)
