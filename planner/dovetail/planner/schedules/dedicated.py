"""Each model on ranks of its own, both at once: what PUZZLE (section 3) calls single-model-dedicated-device.

Trainers hold both models on all ranks, so this is not run; it is what sharing the ranks is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.planner.schedules.problem import Problem


@dataclass(frozen=True)
class Dedicated:
    """`ranks` of actor and critic, the time of all mini-batches, and the largest activation memory of a rank."""

    ranks: tuple[int, int]
    makespan: float
    peak: float


def dedicated(problem: Problem) -> Dedicated | None:
    """The fastest division of the ranks within the memory limit, or None: each model in a pipeline of 1F1B, its layers
    cut evenly, in the time of its mean micro-batch; a mini-batch waits for the same model's optimizer step."""
    found = []
    for actor in range(1, problem.ranks):
        ranks = (actor, problem.ranks - actor)
        times, peaks = zip(*(_alone(problem, m, n) for m, n in enumerate(ranks)), strict=True)
        if max(peaks) <= (problem.memory_limit or float("inf")) * (1 + 1e-9):
            found.append(Dedicated(ranks, max(times), max(peaks)))
    return min(found, key=lambda d: (round(d.makespan, 9), d.peak), default=None)


def _alone(problem: Problem, index: int, ranks: int) -> tuple[float, float]:
    """Time and peak memory of one model on `ranks` ranks."""
    m, mini = problem.models[index], problem.mini_batches
    count = m.micro_batches * m.pipelines  # of a mini-batch
    passes = problem.array(index, "forward") + problem.array(index, "backward")
    stage = float(passes.sum()) / (count * mini) / ranks
    held = float(problem.array(index, "activation").sum()) / (count * mini) / ranks
    latency = float(problem.latencies.max()) if problem.ranks > 1 else 0.0
    batch = (count + ranks - 1) * stage + 2 * (ranks - 1) * latency
    return mini * batch + (mini - 1) * m.optimizer_step, min(count, ranks) * held
