"""The check that every list of passes passes before it runs, apart from the search and its evaluator."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dovetail.pipelines.actions import ScheduleError
from dovetail.pipelines.problem import Problem
from dovetail.pipelines.schedule import Schedule


class Step(NamedTuple):
    """One entry of a rank's list; kind F, B, I or W."""

    model: str
    pipeline: int
    stage: int
    micro_batch: int
    kind: str


Key = tuple[str, int, int, int, str]


def steps(schedule: Schedule) -> list[list[Step]]:
    """A schedule as lists of steps, one per rank."""
    lists: list[list[Step]] = [[] for _ in range(schedule.instance.ranks)]
    for p in schedule.passes():
        lists[p.rank].append(Step(p.model, p.pipeline, p.stage, p.micro_batch, p.kind))
    return lists


def check_steps(problem: Problem, lists: Sequence[Sequence[Step]], receives_ahead: int | None = None) -> None:
    """Raise ScheduleError, with the reason, unless the lists train both models and cannot deadlock.

    Checked: every pass of every micro-batch once, on one rank a stage; the order of micro-batches on each channel alike
    at both ends; no cycle among passes; no forward of a mini-batch before the model's optimizer step; the memory
    limit.

    `receives_ahead` None: a rank goes on computing while its sends wait, as the executor does; transfers may then
    still rendezvous, if every rank issues them in `transfer_order`. A number n: a send blocks its rank until
    the receive is posted, n passes before the one that needs it; few schedules survive that."""
    places = _places(problem, lists)
    _channels(problem, lists)
    _memory(problem, lists)
    _cycles(problem, lists, places, receives_ahead)


def transfer_order(problem: Problem, lists: Sequence[Sequence[Step]]) -> list[tuple[int, int, Step]]:
    """All transfers (sender, receiver, the pass whose output travels) in one order that is safe for all ranks.

    A rank that issues its own sends and receives in this order on one stream cannot deadlock, even where both
    sides of a transfer wait for each other: a pass needs only transfers of passes that come earlier here. Raises
    ScheduleError where the lists have a cycle."""
    places = _places(problem, lists)
    stages = {m.name: m.stages for m in problem.models}
    order = []
    for rank, at in _cycles(problem, lists, places, None):
        step = lists[rank][at]
        receiver = _receiver(step, stages[step.model], places)
        if receiver is not None:
            order.append((rank, places[receiver][0], step))
    return order


def _places(problem: Problem, lists: Sequence[Sequence[Step]]) -> dict[Key, tuple[int, int]]:
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
                or not (0 <= step.pipeline < m.pipelines and 0 <= step.stage < m.stages)
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
            for stage in range(m.stages):
                for q in range(m.micro_batches * problem.mini_batches):
                    kinds = {k for k in "FBIW" if (name, pipeline, stage, q, k) in found}
                    if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                        missing = "F" if "F" not in kinds else "B (or I and W)"
                        extra = f"; it has {' and '.join(sorted(kinds))}" if kinds else ""
                        raise ScheduleError(
                            f"{name}'s micro-batch {q} lacks {missing} in stage {stage} of pipeline {pipeline}{extra}"
                        )
    return found


def _channels(problem: Problem, lists: Sequence[Sequence[Step]]) -> None:
    """Per model, pipeline and direction, neighbouring stages must agree on the order of micro-batches."""
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


def _memory(problem: Problem, lists: Sequence[Sequence[Step]]) -> None:
    limit = problem.memory_limit
    if limit is None:
        return
    sizes = {m.name: (problem.array(i, "activation")[m.first :], m.stages) for i, m in enumerate(problem.models)}
    for rank, mine in enumerate(lists):
        held = 0.0
        for step in mine:
            array, stages = sizes[step.model]
            size = float(array[step.pipeline * stages + step.stage, step.micro_batch])
            if step.kind == "F":
                held += size
            elif step.kind in ("B", "W"):
                held -= size
            if held > limit * (1 + 1e-9):
                raise ScheduleError(
                    f"rank {rank} holds {held:g} of activations at {_name(step)}; the limit is {limit:g}"
                )


def _cycles(
    problem: Problem, lists: Sequence[Sequence[Step]], places: dict[Key, tuple[int, int]], ahead: int | None
) -> list[tuple[int, int]]:
    """Kahn's algorithm over two nodes a pass, computed and sent; (rank, place) of the passes as they are computed."""
    offsets = [0]
    for mine in lists:
        offsets.append(offsets[-1] + 2 * len(mine))
    total = offsets[-1]
    follow: list[list[int]] = [[] for _ in range(total)]
    missing = [0] * total

    def done(at: tuple[int, int]) -> int:
        return offsets[at[0]] + 2 * at[1]

    def edge(first: int, second: int) -> None:
        follow[first].append(second)
        missing[second] += 1

    models = {m.name: m for m in problem.models}
    last_of: dict[tuple[str, int], list[int]] = {}
    for key, place in places.items():
        if key[4] in ("B", "W"):
            last_of.setdefault((key[0], key[3] // models[key[0]].micro_batches), []).append(done(place))
    for rank, mine in enumerate(lists):
        for at, step in enumerate(mine):
            here = done((rank, at))
            edge(here, here + 1)
            if at:
                # The previous pass must be sent, or only computed.
                edge(here - 1 if ahead is not None else here - 2, here)
            for need in _needs(step, models[step.model].stages, places):
                edge(done(places[need]), here)
            if step.kind == "F" and (block := step.micro_batch // models[step.model].micro_batches):
                for before in last_of[step.model, block - 1]:
                    edge(before, here)
            receiver = _receiver(step, models[step.model].stages, places)
            if ahead is not None and receiver is not None:
                # The receive is posted once the pass `ahead` places earlier has been reached.
                other, index = places[receiver]
                if index - ahead > 0:
                    edge(offsets[other] + 2 * (index - ahead) - 1, here + 1)
    ready = deque(node for node in range(total) if not missing[node])
    finished = 0
    order: list[tuple[int, int]] = []
    where = [(rank, at) for rank, mine in enumerate(lists) for at in range(len(mine))]
    while ready:
        node = ready.popleft()
        finished += 1
        if node % 2 == 0:
            order.append(where[node // 2])
        for nxt in follow[node]:
            missing[nxt] -= 1
            if not missing[nxt]:
                ready.append(nxt)
    if finished < total:
        for rank, mine in enumerate(lists):
            for at, step in enumerate(mine):
                if missing[done((rank, at))] or missing[done((rank, at)) + 1]:
                    stuck = sum(any(missing[offsets[r] : offsets[r + 1]]) for r in range(len(lists)))
                    raise ScheduleError(
                        f"the schedule deadlocks: rank {rank} waits at {_name(step)}, "
                        f"and {stuck} of {len(lists)} ranks never finish"
                    )
    return order


def _needs(step: Step, stages: int, places: dict[Key, tuple[int, int]]) -> list[Key]:
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


def _receiver(step: Step, stages: int, places: dict[Key, tuple[int, int]]) -> Key | None:
    model, pipeline, stage, q, kind = step
    if kind == "F":
        return (model, pipeline, stage + 1, q, "F") if stage + 1 < stages else None
    if kind == "W" or stage == 0:
        return None
    whole: Key = (model, pipeline, stage - 1, q, "B")
    return whole if whole in places else (model, pipeline, stage - 1, q, "I")


def _name(step: Step) -> str:
    return (
        f"{step.kind} of {step.model}'s micro-batch {step.micro_batch} (pipeline {step.pipeline}, stage {step.stage})"
    )
