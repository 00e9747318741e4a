"""Runs the rounds of a search on one instance: rules, justification, annealing and CP-SAT.

A round is a fixed amount of work in a few tasks, each with a seed of its own. Any number of threads may run them, as
the kernels release the GIL. So the answer depends on the seed and the effort, but not on the number of cores. Only the
time limit changes it, because it ends a round with the best schedule so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from dovetail.pipelines.bound import lower_bound
from dovetail.pipelines.families import Family
from dovetail.pipelines.instance import Coupling, SearchInstance, mirror, unmirror
from dovetail.pipelines.schedule import Schedule, evaluate, steps_argument, timing_arguments
from dovetail.pipelines.search.annealing import anneal
from dovetail.pipelines.search.exact import ExactSearch, Proof, available
from dovetail.pipelines.search.listing import justify, search_rules
from dovetail.pipelines.simulate import Ints

TASKS = 4
UNLIMITED = 1e300
EXACT_SIZE = 3200  # passes; with more, CP-SAT takes too much memory and time
LARGE = 40_000  # passes; with more, a round of rules takes longer than most searches
_POLL = 0.05  # seconds
T = TypeVar("T")
Clock = Callable[[], float]
Progress = Callable[[str, float, float], None]
"""Called with the method, the best makespan so far and its peak memory."""


@dataclass(frozen=True)
class SearchEffort:
    """How long and how hard to search.

    The search ends `seconds` after its start by `clock`. It may end a tenth of a second later, or after its first and
    smallest round. This round is left out if it takes long and a schedule is known. `memory`: look for less memory once
    the makespan is found. `enough`: below this peak memory the search stops looking for less. `scale`: the work of a
    round. `exact`: also use CP-SAT if it is installed. `compiled`: use the kernels and CP-SAT; without, or without
    numba, a few rules are tried in plain Python (`few_rules`)."""

    seconds: float = 20.0
    clock: Clock = lambda: 0.0
    workers: int = 2
    seed: int = 0
    memory: bool = True
    enough: float = 0.0
    scale: float = 1.0
    exact: bool = True
    compiled: bool = True
    progress: Progress | None = None


class Level(NamedTuple):
    """What one level of a search tries. Cheap methods come first, and then more work for what they did not find.
    `part`: the fraction of a round's work. `rules`, `justifying`, `annealing`: the numbers of rounds. `work`: the limit
    of each of `runs` runs of CP-SAT, in its deterministic seconds. `thin`: the number of tries without the larger
    model's steady state. `near`: such a try anneals only if its best schedule is within this factor of the target."""

    part: float = 1.0
    rules: int = 0
    justifying: int = 0
    annealing: int = 0
    work: float = 0.0
    runs: int = 0
    thin: int = 0
    near: float = 1.0


@dataclass
class Rounds:
    """The rounds of one search and the best schedule so far.

    `proved`: no schedule within the problem's own memory limit is faster than this."""

    instance: SearchInstance
    family: Family
    effort: SearchEffort
    pool: ThreadPoolExecutor
    best: Schedule | None = None
    started: float = 0.0
    rounds: int = 0
    proved: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.effort.clock()
        self.bound = lower_bound(self.instance)
        self.unit = float(self.instance.duration[:, 0].max())
        self.size = self.instance.ranks * self.instance.length
        # A mirrored schedule needs barriers that look alike from both ends.
        symmetric = self.instance.coupling is not Coupling.SERIAL and np.ptp(self.instance.step) == 0
        self.mirrored = mirror(self.instance) if symmetric else None

    def left(self) -> float:
        return self.effort.seconds - (self.effort.clock() - self.started)

    @property
    def long(self) -> bool:
        """Whether a round takes long and is not needed, because a schedule is known."""
        return self.best is not None and self.size > LARGE

    def report(self, what: str) -> None:
        if self.effort.progress is not None and self.best is not None:
            self.effort.progress(what, self.best.makespan, self.best.peak)

    def keep(self, orders: Ints, how: str) -> Schedule:
        found = evaluate(self.instance, orders, self.family.name, how)
        found = replace(found, seed=self.effort.seed)
        if self.best is None or rank(found) < rank(self.best):
            self.best = found
        return found

    def attempt(self, limit: float, target: float, level: Level) -> Schedule | None:
        """The fastest schedule that is found within `limit`, or None. The search stops at the makespan `target`."""
        top: list[Schedule] = []
        if self.best is not None and self.best.peak <= limit * (1 + 1e-9):
            top.append(self.best)
        # If one rule takes long, a few random ones find nothing better than a schedule that is known already.
        work = [] if top and self.size > LARGE else ["rules"] * level.rules
        if self.mirrored is not None:
            work += ["justification"] * level.justifying
        for number, kind in enumerate(work + ["annealing"] * level.annealing):
            # The first round always runs, unless it is a long one and a schedule is known.
            if (self.rounds or self.long) and self.left() <= 0:
                break
            self.rounds += 1
            if kind == "rules" or not top:
                results = self.rules(limit, target, level.part)
            elif kind == "justification":
                results = self.justify(top, limit, target, level.part)
            else:
                results = self.anneal(top, limit, target, level.part * 2 ** min(number - len(work), 3))
            top = sorted([*top, *results], key=rank)[:TASKS]
            self.report(kind)
            if top and top[0].makespan <= target * (1 + 1e-9):
                return top[0]
        return top[0] if top else None

    def rules(self, limit: float, target: float, part: float) -> list[Schedule]:
        """A round of random priority rules, mostly on the mirror image."""
        tries = max(8, int(min(20000, 1.5e7 / self.size) * self.effort.scale * part))

        def task(number: int, stop: Ints) -> tuple[float, Ints]:
            mirrored = self.mirrored if not self.instance.split and number % 4 != 3 else None
            i = self.instance if mirrored is None else mirrored
            orders = np.zeros((i.ranks, i.length), np.int64)
            end = search_rules(
                *timing_arguments(i), i.position, i.stages, i.activation, limit * (1 + 1e-9), tries,
                self.seed(number), target, self.unit, stop, number, orders,
            )  # fmt: skip
            return float(end), orders if mirrored is None else unmirror(i, orders)

        return self._kept(task, target, "rules")

    def justify(self, starts: list[Schedule], limit: float, target: float, part: float) -> list[Schedule]:
        """A round of justification."""
        assert self.mirrored is not None
        tries = max(8, int(min(10000, 7.5e6 / self.size) * self.effort.scale * part))
        i, both = self.instance, (self.instance, self.mirrored)
        duration, activation, latency = (
            np.stack([getattr(side, field) for side in both]) for field in ("duration", "activation", "latency")
        )
        forms = np.array([side.form for side in both])

        def task(number: int, stop: Ints) -> tuple[float, Ints]:
            orders = np.zeros((i.ranks, i.length), np.int64)
            end = justify(
                duration, i.before, i.after, i.total, i.group, i.wait, steps_argument(i), latency, activation, forms,
                limit * (1 + 1e-9), starts[number % len(starts)].finish, tries, self.seed(number), target, self.unit,
                stop, number, orders,
            )  # fmt: skip
            return float(end), orders

        return self._kept(task, target, "justification")

    def anneal(self, starts: list[Schedule], limit: float, target: float, part: float) -> list[Schedule]:
        """A round of annealing. A move takes longer, the longer the schedule is."""
        moves = max(500, int(min(150_000, 6e7 / self.size) * self.effort.scale * part))
        i = self.instance
        quantum = self.unit / 5

        def task(number: int, stop: Ints) -> tuple[float, Ints]:
            start = starts[0] if number < 2 else starts[min(number - 1, len(starts) - 1)]
            orders = np.zeros_like(start.orders)
            hot, reach = ((2.0, 8), (1.0, 20), (3.0, 20), (2.0, 40))[number]
            end = anneal(
                start.orders, *timing_arguments(i), i.tail, i.activation, limit * (1 + 1e-9), target, moves,
                hot * quantum, 0.1 * quantum, reach, self.seed(number), stop, number, orders,
            )  # fmt: skip
            return float(end), orders

        return self._kept(task, target, "annealing")

    def exact(self, limit: float, target: float, work: float, tasks: int) -> Proof:
        """CP-SAT's answer. A schedule that it finds is kept.

        The time to an answer differs by orders of magnitude. So `tasks` short runs of different seeds find more than a
        long one."""
        work *= self.effort.scale
        if (
            not self.effort.exact
            or work < 0.02
            or self.size > EXACT_SIZE
            or not available()
            or self.left() <= 1e-3 * self.size
        ):
            return Proof(None)
        self.rounds += 1
        cap = None if limit >= UNLIMITED else limit
        searches: list[ExactSearch | None] = [None] * tasks

        def task(number: int, stop: Ints) -> Proof:
            if stop[:number].any() or stop[-1]:
                return Proof(None)
            search = ExactSearch(self.instance, target, cap)
            searches[number] = search
            answer = search.run(work, self.seed(number), stopped=lambda: bool(stop[:number].any() or stop[-1]))
            if answer.orders is not None or answer.impossible:
                stop[number] = 1
            return answer

        def poll(stop: Ints) -> None:
            for number, search in enumerate(searches):
                if search is not None and (stop[-1] or stop[:number].any()):
                    search.stop()

        for answer in self._run(task, tasks, poll):
            if answer.orders is not None:
                self.keep(answer.orders, "CP-SAT")
                self.report("CP-SAT")
                return answer
            if answer.impossible:
                return answer
        return Proof(None)

    def _run(
        self, task: Callable[[int, Ints], T], count: int, poll: Callable[[Ints], None] | None = None
    ) -> Iterable[T]:
        """The results of task(number, stop), in order. Task i sets stop[i] once the later ones need not go on. The last
        element is set here when the time is up. In the first round it is set only if that is a long one."""
        stop = np.zeros(count + 1, np.int64)
        futures: list[Future[T]] = [self.pool.submit(task, number, stop) for number in range(count)]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, timeout=_POLL)
            if (self.rounds > 1 or self.long) and self.left() <= 0:
                stop[-1] = 1
            if poll is not None and pending:
                poll(stop)
        return [future.result() for future in futures]

    def seed(self, task: int) -> int:
        return (self.effort.seed * 1_000_003 + self.rounds * 101 + task * 7919) % (2**31 - 1)

    def _kept(self, task: Callable[[int, Ints], tuple[float, Ints]], target: float, how: str) -> list[Schedule]:
        """The schedules of the tasks' orders, up to the first that reached the target. Later ones do not count, because
        the moment when they were stopped depends on the cores."""
        found = []
        for end, orders in self._run(task, TASKS):
            if end < UNLIMITED:
                found.append(self.keep(orders, how))
            if end <= target * (1 + 1e-9):
                break
        return found


def rank(schedule: Schedule) -> tuple[float, float]:
    """A key for sorting by makespan, and then by peak memory. Makespans that differ by rounding only are equal."""
    return (float(f"{schedule.makespan:.9g}"), schedule.peak)
