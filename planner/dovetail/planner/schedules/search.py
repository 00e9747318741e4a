"""The search: latency first, then memory at that latency (in place of RLHFuse's annealing, section 5.2).

1. Random priority rules for a list scheduler, on the problem and on its mirror image in time.
2. Annealing on the critical path from the best of those, under a hard limit of activation memory.

Work is done in rounds of fixed size, by tasks with seeds of their own, on any number of threads (the kernels hold no
lock): the answer depends on the seed and the effort, not on the number of cores; a deadline ends the search between
rounds with the best so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.planner.schedules.annealing import anneal
from dovetail.planner.schedules.families import Family, family_instance, fixed_words
from dovetail.planner.schedules.instance import Coupling, Instance, Ints, lower_bound
from dovetail.planner.schedules.jit import COMPILED
from dovetail.planner.schedules.listing import search_rules
from dovetail.planner.schedules.problem import Problem, ProblemError, serial_memory
from dovetail.planner.schedules.schedule import Schedule, evaluate, mirror, timing_arguments, unmirror

TASKS = 4
UNLIMITED = 1e300
Clock = Callable[[], float]
Progress = Callable[[str, float, float], None]
"""Called with what is being tried, the best makespan so far and its peak memory."""


@dataclass(frozen=True)
class Effort:
    """How long to search. `clock` in seconds; `seconds` after the start no further round begins."""

    seconds: float = 20.0
    clock: Clock = lambda: 0.0
    workers: int = 2
    seed: int = 0
    memory: bool = True  # look for less memory once the latency is found
    scale: float = 1.0  # work of a round
    progress: Progress | None = None


@dataclass
class _Search:
    instance: Instance
    family: Family
    effort: Effort
    pool: ThreadPoolExecutor
    best: Schedule | None = None
    started: float = 0.0
    rounds: int = field(default=0)

    def __post_init__(self) -> None:
        self.started = self.effort.clock()
        self.bound = lower_bound(self.instance)
        self.unit = float(self.instance.duration[:, 0].max())
        self.size = self.instance.ranks * self.instance.length
        # A mirrored schedule needs barriers that look alike from both ends.
        symmetric = self.instance.coupling is not Coupling.SERIAL and np.ptp(self.instance.step) == 0
        self.mirrored = mirror(self.instance) if not self.instance.split and symmetric else None

    def left(self) -> float:
        return self.effort.seconds - (self.effort.clock() - self.started)

    def report(self, what: str) -> None:
        if self.effort.progress is not None and self.best is not None:
            self.effort.progress(what, self.best.makespan, self.best.peak)

    def keep(self, words: Ints, how: str) -> Schedule:
        found = evaluate(self.instance, words, self.family.name, how)
        found = replace(found, seed=self.effort.seed)
        if self.best is None or _key(found) < _key(self.best):
            self.best = found
        return found

    def attempt(
        self, limit: float, target: float, rule_rounds: int, anneal_rounds: int, part: float = 1.0
    ) -> Schedule | None:
        """The fastest schedule within `limit`, stopping at `target`, or None. `part`: of a round's work."""
        top: list[Schedule] = []
        if self.best is not None and self.best.peak <= limit * (1 + 1e-9):
            top.append(self.best)
        for number in range(rule_rounds + anneal_rounds):
            # One round always, so that there is an answer better than a rule's.
            if self.rounds and self.left() <= 0:
                break
            self.rounds += 1
            if number < rule_rounds or not top:
                results = self._rules(limit, target, part)
            else:
                results = self._anneal(top, limit, target, part * 2 ** min(number - rule_rounds, 3))
            top = sorted([*top, *results], key=_key)[:TASKS]
            self.report("rules" if number < rule_rounds else "annealing")
            if top and top[0].makespan <= target * (1 + 1e-9):
                return top[0]
        return top[0] if top else None

    def _rules(self, limit: float, target: float, part: float) -> list[Schedule]:
        tries = min(20000, 1.5e7 / self.size) * self.effort.scale * part if COMPILED else 20
        tries = max(8, int(tries))
        stop = np.zeros(TASKS, np.int64)

        def task(number: int) -> tuple[float, Ints]:
            use_mirror = self.mirrored is not None and number % 4 != 3
            i = self.mirrored if use_mirror and self.mirrored is not None else self.instance
            words = np.zeros((i.ranks, i.length), np.int64)
            end = search_rules(
                i.duration, i.activation, i.before, i.after, i.position, i.stages, i.total, i.group, i.wait, i.step,
                float(i.problem.communication), i.split, np.full(i.ranks, limit * (1 + 1e-9)), tries,
                self._seed(number), target, self.unit, stop, number, words,
            )  # fmt: skip
            return float(end), unmirror(words) if use_mirror else words

        found = self._first(self.pool.map(task, range(TASKS)), target)
        return [self.keep(words, "rules") for words in found]

    def _anneal(self, starts: list[Schedule], limit: float, target: float, part: float) -> list[Schedule]:
        # A move's cost grows with the schedule.
        moves = min(150_000, 6e7 / self.size) * self.effort.scale * part if COMPILED else 200
        moves = max(500 if COMPILED else 200, int(moves))
        stop = np.zeros(TASKS, np.int64)
        i = self.instance
        quantum = self.unit / 5

        def task(number: int) -> tuple[float, Ints]:
            start = starts[0] if number < 2 else starts[min(number - 1, len(starts) - 1)]
            words = start.words.copy()
            hot, reach = ((2.0, 8), (1.0, 20), (3.0, 20), (2.0, 40))[number]
            _, end = anneal(
                start.words, i.length, i.duration, i.tail, i.activation, *timing_arguments(i)[1:],
                np.full(i.ranks, limit * (1 + 1e-9)), -1.0, target, moves, hot * quantum, 0.1 * quantum, reach,
                self._seed(number), stop, number, words,
            )  # fmt: skip
            return float(end), words

        found = self._first(self.pool.map(task, range(TASKS)), target)
        return [self.keep(words, "annealing") for words in found]

    def _seed(self, task: int) -> int:
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

    def run(self) -> Schedule | None:
        limit = self.instance.problem.memory_limit
        cap = UNLIMITED if limit is None else limit
        for start in self._starts(cap):
            self.keep(start, "rule")
        found: Schedule | None = None
        for part, rule_rounds, anneal_rounds in ((1 / 16, 1, 0), (1 / 4, 1, 0), (1.0, 1, 0), (1.0, 1, 6)):
            found = self.attempt(cap, self.bound, rule_rounds, anneal_rounds, part) or found
            if found is not None and found.at_bound:
                break
        if found is None:
            return None
        if self.effort.memory:
            self._less_memory(serial_memory(self.instance.problem))
        return self.best

    def _starts(self, cap: float) -> Iterable[Ints]:
        """Plain 1F1B of one model after the other, if it fits: never worse than that."""
        if not self.instance.split:
            words = fixed_words(self.instance, Family("overlapped", "", self.instance.coupling))
            if evaluate(self.instance, words).peak <= cap * (1 + 1e-9):
                yield words

    def _less_memory(self, serial: float) -> None:
        """Down to serial 1F1B's memory: halve the interval between what failed and what was reached.

        What can be found is often found at once and what can not takes a whole round, so rounds begin small."""
        assert self.best is not None
        target = self.best.makespan
        goal = serial * 1.0045  # 1.00 in two decimals
        for part, rule_rounds, anneal_rounds in _LADDER:
            failed = 0.0
            while self.left() > 0 and self.best.peak > max(goal, failed * 1.01):
                trial = goal if not failed else (failed + self.best.peak) / 2
                found = self.attempt(trial, target, rule_rounds, anneal_rounds, part)
                if found is None or found.makespan > target * (1 + 1e-9):
                    failed = trial


# Part of a round's work, rounds of rules, rounds of annealing.
_LADDER = ((1 / 16, 1, 0), (1 / 4, 1, 0), (1.0, 1, 0), (1.0, 1, 3), (1.0, 2, 5))


def _key(schedule: Schedule) -> tuple[float, float]:
    # Ends that differ by rounding only are equal.
    return (float(f"{schedule.makespan:.9g}"), schedule.peak)


def find(problem: Problem, family: Family, effort: Effort) -> Schedule:
    """The family's best schedule within the problem's memory limit: the fastest, of those the one of the lowest peak.

    Raises ProblemError where nothing within the limit was found."""
    instance = family_instance(problem, family)
    started = effort.clock()
    limit = problem.memory_limit
    if family.fixed:
        found = evaluate(instance, fixed_words(instance, family), family.name)
        if limit is not None and found.peak > limit * (1 + 1e-9):
            raise ProblemError(
                f"the family {family.name} needs {found.peak:g} of activation memory, the limit is {limit:g}; "
                "raise the limit or choose a searched family"
            )
        return replace(found, seconds=effort.clock() - started)
    with ThreadPoolExecutor(effort.workers) as pool:
        best = _Search(instance, family, effort, pool).run()
    if best is None:
        raise ProblemError(
            f"no {family.name} schedule within a memory limit of {limit:g} was found; serial 1F1B takes "
            f"{serial_memory(problem):g} and one micro-batch at a time {problem.least_memory:g}"
        )
    return replace(best, seconds=effort.clock() - started)
