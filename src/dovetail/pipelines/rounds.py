"""Rounds of a search: rules, justification, annealing and CP-SAT on one instance, by tasks with seeds of their own.

Work is done in rounds of fixed size, on any number of threads (the kernels hold no lock): the answer depends on the
seed and the effort, not on the number of cores, unless the time runs out, which ends a round with the best so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from dovetail.pipelines.annealing import anneal
from dovetail.pipelines.exact import Answer, ExactSearch, available
from dovetail.pipelines.families import Family
from dovetail.pipelines.instance import Coupling, Instance, Ints, lower_bound
from dovetail.pipelines.jit import COMPILED
from dovetail.pipelines.justification import justify
from dovetail.pipelines.listing import search_rules
from dovetail.pipelines.rungs import Rung
from dovetail.pipelines.schedule import Schedule, evaluate, mirror, timing_arguments, unmirror

TASKS = 4
UNLIMITED = 1e300
EXACT_SIZE = 3200  # passes; beyond, CP-SAT takes more memory and time than it is worth
_POLL = 0.05  # seconds
_DIRECTED = ("duration", "activation", "latency")  # what a mirror image has of its own
T = TypeVar("T")
Clock = Callable[[], float]
Progress = Callable[[str, float, float], None]
"""Called with what is being tried, the best makespan so far and its peak memory."""


@dataclass(frozen=True)
class Effort:
    """How long to search. `clock` in seconds; `seconds` after the start the search ends, within a tenth of a second or
    the time that the first, smallest round takes."""

    seconds: float = 20.0
    clock: Clock = lambda: 0.0
    workers: int = 2
    seed: int = 0
    memory: bool = True  # look for less memory once the latency is found
    enough: float = 0.0  # peak memory below which no less is looked for
    scale: float = 1.0  # work of a round
    exact: bool = True  # ask CP-SAT too
    progress: Progress | None = None


@dataclass
class Rounds:
    """The rounds of one search and the best schedule so far."""

    instance: Instance
    family: Family
    effort: Effort
    pool: ThreadPoolExecutor
    best: Schedule | None = None
    started: float = 0.0
    rounds: int = field(default=0)
    proved: float = 0.0  # no schedule within the problem's own memory limit is faster

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

    def report(self, what: str) -> None:
        if self.effort.progress is not None and self.best is not None:
            self.effort.progress(what, self.best.makespan, self.best.peak)

    def keep(self, words: Ints, how: str) -> Schedule:
        found = evaluate(self.instance, words, self.family.name, how)
        found = replace(found, seed=self.effort.seed)
        if self.best is None or rank(found) < rank(self.best):
            self.best = found
        return found

    def attempt(self, limit: float, target: float, rung: Rung) -> Schedule | None:
        """The fastest schedule within `limit`, stopping at `target`, or None."""
        top: list[Schedule] = []
        if self.best is not None and self.best.peak <= limit * (1 + 1e-9):
            top.append(self.best)
        work = ["rules"] * rung.rules
        if self.mirrored is not None:
            work += ["justification"] * rung.justifying
        for number, kind in enumerate(work + ["annealing"] * rung.annealing):
            # One round always, so that there is an answer better than a rule's.
            if self.rounds and self.left() <= 0:
                break
            self.rounds += 1
            if kind == "rules" or not top:
                results = self.rules(limit, target, rung.part)
            elif kind == "justification":
                results = self.justify(top, limit, target, rung.part)
            else:
                results = self.anneal(top, limit, target, rung.part * 2 ** min(number - len(work), 3))
            top = sorted([*top, *results], key=rank)[:TASKS]
            self.report(kind)
            if top and top[0].makespan <= target * (1 + 1e-9):
                return top[0]
        return top[0] if top else None

    def rules(self, limit: float, target: float, part: float) -> list[Schedule]:
        tries = min(20000, 1.5e7 / self.size) * self.effort.scale * part if COMPILED else 20
        tries = max(8, int(tries))

        def task(number: int, stop: Ints) -> tuple[float, Ints]:
            use_mirror = self.mirrored is not None and not self.instance.split and number % 4 != 3
            i = self.mirrored if use_mirror and self.mirrored is not None else self.instance
            words = np.zeros((i.ranks, i.length), np.int64)
            end = search_rules(
                i.duration, i.activation, i.before, i.after, i.position, i.stages, i.total, i.group, i.wait, i.step,
                i.latency, i.split, np.full(i.ranks, limit * (1 + 1e-9)), tries,
                self.seed(number), target, self.unit, stop, number, words,
            )  # fmt: skip
            return float(end), unmirror(i, words) if use_mirror else words

        found = self._first(self._run(task, TASKS), target)
        return [self.keep(words, "rules") for words in found]

    def justify(self, starts: list[Schedule], limit: float, target: float, part: float) -> list[Schedule]:
        assert self.mirrored is not None
        passes = min(10000, 7.5e6 / self.size) * self.effort.scale * part if COMPILED else 10
        i, both = self.instance, (self.instance, self.mirrored)
        duration, activation, latency = (np.stack([getattr(s, f) for s in both]) for f in _DIRECTED)
        forms = np.array([s.form for s in both])

        def task(number: int, stop: Ints) -> tuple[float, Ints]:
            words = np.zeros((i.ranks, i.length), np.int64)
            end = justify(
                duration, activation, i.before, i.after, i.total, i.group, i.wait, i.step, latency, forms,
                np.full(i.ranks, limit * (1 + 1e-9)), starts[number % len(starts)].finish,
                max(8, int(passes)), self.seed(number), target, self.unit, stop, number, words,
            )  # fmt: skip
            return float(end), words

        found = self._first(self._run(task, TASKS), target)
        return [self.keep(words, "justification") for words in found]

    def anneal(self, starts: list[Schedule], limit: float, target: float, part: float) -> list[Schedule]:
        # A move's cost grows with the schedule.
        moves = min(150_000, 6e7 / self.size) * self.effort.scale * part if COMPILED else 200
        moves = max(500 if COMPILED else 200, int(moves))
        i = self.instance
        quantum = self.unit / 5

        def task(number: int, stop: Ints) -> tuple[float, Ints]:
            start = starts[0] if number < 2 else starts[min(number - 1, len(starts) - 1)]
            words = start.words.copy()
            hot, reach = ((2.0, 8), (1.0, 20), (3.0, 20), (2.0, 40))[number]
            _, end = anneal(
                start.words, i.length, i.duration, i.tail, i.activation, *timing_arguments(i)[1:],
                np.full(i.ranks, limit * (1 + 1e-9)), -1.0, target, moves, hot * quantum, 0.1 * quantum, reach,
                self.seed(number), stop, number, words,
            )  # fmt: skip
            return float(end), words

        found = self._first(self._run(task, TASKS), target)
        return [self.keep(words, "annealing") for words in found]

    def exact(self, limit: float, target: float, work: float, tasks: int) -> Answer:
        """CP-SAT's answer; a schedule that it finds is kept.

        Its times to an answer are spread over orders of magnitude, so `tasks` short runs of different seeds find more
        than a long one."""
        work *= self.effort.scale
        if (
            not self.effort.exact
            or work < 0.02
            or self.size > EXACT_SIZE
            or not available()
            or self.left() <= 1e-3 * self.size
        ):
            return Answer(None)
        self.rounds += 1
        cap = None if limit >= UNLIMITED else limit
        searches: list[ExactSearch | None] = [None] * tasks

        def task(number: int, stop: Ints) -> Answer:
            if stop[:number].any() or stop[-1]:
                return Answer(None)
            search = ExactSearch(self.instance, target, cap)
            searches[number] = search
            answer = search.run(work, self.seed(number), stopped=lambda: bool(stop[:number].any() or stop[-1]))
            if answer.words is not None or answer.impossible:
                stop[number] = 1
            return answer

        def poll(stop: Ints) -> None:
            for number, search in enumerate(searches):
                if search is not None and (stop[-1] or stop[:number].any()):
                    search.stop()

        for answer in self._run(task, tasks, poll):
            if answer.words is not None:
                self.keep(answer.words, "CP-SAT")
                self.report("CP-SAT")
                return answer
            if answer.impossible:
                return answer
        return Answer(None)

    def _run(
        self, task: Callable[[int, Ints], T], count: int, poll: Callable[[Ints], None] | None = None
    ) -> Iterable[T]:
        """The results of task(number, stop), in order. stop[i] is for task i to set once the later ones need not go on;
        the last is set here when the time is up, though never in the first round."""
        stop = np.zeros(count + 1, np.int64)
        futures: list[Future[T]] = [self.pool.submit(task, number, stop) for number in range(count)]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, timeout=_POLL)
            if self.rounds > 1 and self.left() <= 0:
                stop[-1] = 1
            if poll is not None and pending:
                poll(stop)
        return [future.result() for future in futures]

    def seed(self, task: int) -> int:
        return (self.effort.seed * 1_000_003 + self.rounds * 101 + task * 7919) % (2**31 - 1)

    @staticmethod
    def _first(results: Iterable[tuple[float, Ints]], target: float) -> list[Ints]:
        """Words of the results up to the first that reached the target: later tasks were cut short at a moment that
        depends on the cores."""
        taken = []
        for end, words in results:
            if end < UNLIMITED:
                taken.append(words)
            if end <= target * (1 + 1e-9):
                break
        return taken


def rank(schedule: Schedule) -> tuple[float, float]:
    # Ends that differ by rounding only are equal.
    return (float(f"{schedule.makespan:.9g}"), schedule.peak)
