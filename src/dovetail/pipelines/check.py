"""The check that every schedule passes before it runs. It shares no code with the search and the simulator."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dovetail.pipelines.problem import ScheduleProblem
from dovetail.pipelines.schedule import Schedule


class ScheduleError(ValueError):
    """A schedule that would not run. The message names the rank and the pass."""


class RankPass(NamedTuple):
    """One pass in a rank's list. `kind` is F, B, I or W."""

    model: str
    pipeline: int
    stage: int
    micro_batch: int
    kind: str


Key = tuple[str, int, int, int, str]


def steps(schedule: Schedule) -> list[list[RankPass]]:
    """A schedule as lists of steps, one list for each rank."""
    lists: list[list[RankPass]] = [[] for _ in range(schedule.instance.ranks)]
    for p in schedule.passes():
        lists[p.rank].append(RankPass(p.model, p.pipeline, p.stage, p.micro_batch, p.kind))
    return lists


def check_steps(problem: ScheduleProblem, lists: Sequence[Sequence[RankPass]]) -> None:
    """Raise ScheduleError, with the reason, unless the lists train both models and cannot deadlock.

    Every pass of every micro-batch must occur exactly once, and each stage must be on one rank. Both ends of a channel
    must have the same order of micro-batches. No pass may depend on itself. A mini-batch's forwards must come after the
    model's optimizer step. No rank may exceed the memory limit. The check assumes that a rank continues to compute
    while its sends wait, as the executor does."""
    stages = _stages(problem, lists)
    places = _places(problem, lists, stages)
    _channels(lists)
    _memory(problem, lists, stages)
    _cycles(problem, lists, places, stages)


def _stages(problem: ScheduleProblem, lists: Sequence[Sequence[RankPass]]) -> dict[str, int]:
    """The number of stages of each model's pipelines. It must be a multiple of the ranks of a pipeline."""
    highest = {m.name: m.stages - 1 for m in problem.models}
    for step in itertools.chain.from_iterable(lists):
        highest[step.model] = max(highest.get(step.model, 0), step.stage)
    for m in problem.models:
        if (count := highest[m.name] + 1) % m.stages:
            raise ScheduleError(
                f"{m.name} has {count} stages on {m.stages} ranks; each rank must hold equally many of them"
            )
    return {name: last + 1 for name, last in highest.items()}


def _places(
    problem: ScheduleProblem, lists: Sequence[Sequence[RankPass]], stages: dict[str, int]
) -> dict[Key, tuple[int, int]]:
    if len(lists) != problem.ranks:
        raise ScheduleError(f"the schedule has {len(lists)} ranks, the problem {problem.ranks}")
    models = {m.name: m for m in problem.models}
    found: dict[Key, tuple[int, int]] = {}
    homes: dict[tuple[str, int, int], int] = {}
    for rank, mine in enumerate(lists):
        for at, step in enumerate(mine):
            m = models.get(step.model)
            if (
                m is None
                or not (0 <= step.pipeline < m.pipelines and 0 <= step.stage < stages[m.name])
                or not 0 <= step.micro_batch < m.micro_batches * problem.mini_batches
                or step.kind not in ("F", "B", "I", "W")
            ):
                raise ScheduleError(f"rank {rank} runs {_name(step)}, which is not part of the problem")
            if step in found:
                raise ScheduleError(f"rank {rank} runs {_name(step)}, which rank {found[step][0]} runs too")
            found[tuple(step)] = (rank, at)  # type: ignore[index]
            home = homes.setdefault((step.model, step.pipeline, step.stage), rank)
            if home != rank:
                raise ScheduleError(
                    f"ranks {home} and {rank} both run stage {step.stage} of {step.model}'s pipeline {step.pipeline}"
                )
    for name, m in models.items():
        for pipeline in range(m.pipelines):
            for stage in range(stages[name]):
                for q in range(m.micro_batches * problem.mini_batches):
                    kinds = {k for k in "FBIW" if (name, pipeline, stage, q, k) in found}
                    if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                        missing = "F" if "F" not in kinds else "B (or I and W)"
                        extra = f"; it has {' and '.join(sorted(kinds))}" if kinds else ""
                        raise ScheduleError(
                            f"{name}'s micro-batch {q} lacks {missing} in stage {stage} of pipeline {pipeline}{extra}"
                        )
    return found


def _channels(lists: Sequence[Sequence[RankPass]]) -> None:
    """Neighbouring stages must agree on the order of micro-batches, for each model, pipeline and direction."""
    orders: dict[tuple[str, int, int, str], list[int]] = {}
    for mine in lists:
        for step in mine:
            if step.kind != "W":
                kind = "F" if step.kind == "F" else "B"
                orders.setdefault((step.model, step.pipeline, step.stage, kind), []).append(step.micro_batch)
    for (model, pipeline, stage, kind), order in orders.items():
        other = orders.get((model, pipeline, stage + 1, kind))
        if other is not None and other != order:
            at = next(i for i, (a, b) in enumerate(zip(order, other, strict=True)) if a != b)
            raise ScheduleError(
                f"stages {stage} and {stage + 1} of {model}'s pipeline {pipeline} disagree on the order of {kind}: "
                f"number {at} is micro-batch {order[at]} and {other[at]}; a channel delivers in one order"
            )


def _memory(problem: ScheduleProblem, lists: Sequence[Sequence[RankPass]], stages: dict[str, int]) -> None:
    limit = problem.memory_limit
    if limit is None:
        return
    models = enumerate(problem.models)
    sizes = {m.name: problem.along(i, "activation", stages[m.name] // m.stages) for i, m in models}
    for rank, mine in enumerate(lists):
        held = 0.0
        for step in mine:
            size = float(sizes[step.model][step.pipeline, step.stage, step.micro_batch])
            if step.kind == "F":
                held += size
            elif step.kind in ("B", "W"):
                held -= size
            if held > limit * (1 + 1e-9):
                raise ScheduleError(
                    f"rank {rank} holds {held:g} of activations at {_name(step)}; the limit is {limit:g}"
                )


def _cycles(
    problem: ScheduleProblem,
    lists: Sequence[Sequence[RankPass]],
    places: dict[Key, tuple[int, int]],
    stages: dict[str, int],
) -> None:
    """No pass may depend on itself. Kahn's algorithm checks this on the graph of passes."""
    models = {m.name: m for m in problem.models}
    last_of: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for key, place in places.items():
        if key[4] in ("B", "W"):
            last_of.setdefault((key[0], key[3] // models[key[0]].micro_batches), []).append(place)
    follow: dict[tuple[int, int], list[tuple[int, int]]] = {place: [] for place in places.values()}
    missing = dict.fromkeys(follow, 0)
    # An optimizer step is a node of its own, at a rank below 0. Without it, the edges from each pass before the step to
    # each pass after it would be the square of the passes.
    step_of = {name: -1 - index for index, name in enumerate(models)}
    for (name, block), ends in last_of.items():
        missing[step_of[name], block] = len(ends)
        follow[step_of[name], block] = []
        for place in ends:
            follow[place].append((step_of[name], block))
    for rank, mine in enumerate(lists):
        for at, step in enumerate(mine):
            earlier = [places[need] for need in _needs(step, stages[step.model], places)]
            if at:
                earlier.append((rank, at - 1))
            if step.kind == "F" and (block := step.micro_batch // models[step.model].micro_batches):
                earlier.append((step_of[step.model], block - 1))
            missing[rank, at] = len(earlier)
            for place in earlier:
                follow[place].append((rank, at))
    ready = deque(place for place, count in missing.items() if not count)
    while ready:
        for after in follow[ready.popleft()]:
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    stuck = sorted(place for place, count in missing.items() if count and place[0] >= 0)
    if stuck:
        rank, at = stuck[0]
        raise ScheduleError(
            f"the schedule deadlocks: rank {rank} waits at {_name(lists[rank][at])}, "
            f"and {len({r for r, _ in stuck})} of {len(lists)} ranks never finish"
        )


def _needs(step: RankPass, stages: int, places: dict[Key, tuple[int, int]]) -> list[Key]:
    model, pipeline, stage, q, kind = step
    if kind == "F":
        return [(model, pipeline, stage - 1, q, "F")] if stage else []
    if kind == "W":
        return [(model, pipeline, stage, q, "I")]
    needs: list[Key] = [(model, pipeline, stage, q, "F")]
    if stage + 1 < stages:
        whole: Key = (model, pipeline, stage + 1, q, "B")
        needs.append(whole if whole in places else (model, pipeline, stage + 1, q, "I"))
    return needs


def _name(step: RankPass) -> str:
    return (
        f"{step.kind} of {step.model}'s micro-batch {step.micro_batch} (pipeline {step.pipeline}, stage {step.stage})"
    )
