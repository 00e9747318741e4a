"""The search: latency first, then memory at that latency (in place of RLHFuse's annealing, section 5.2).

1. Random priority rules for a list scheduler, on the problem and on its mirror image in time.
2. Annealing on the critical path from the best of those, under a hard limit of activation memory.
   Many micro-batches: from the schedule of a few, its steady part repeated.
3. CP-SAT, where OR-Tools is installed, on what these do not reach; it also proves that nothing is faster.

Work is done in rounds of fixed size, by tasks with seeds of their own, on any number of threads (the kernels hold no
lock): the answer depends on the seed and the effort, not on the number of cores, unless the time runs out, which ends
the search with the best so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from dovetail.planner.schedules.annealing import anneal
from dovetail.planner.schedules.exact import Answer, ExactSearch, available, time_unit
from dovetail.planner.schedules.families import Family, family_instance, fixed_words
from dovetail.planner.schedules.instance import Coupling, Instance, Ints, lower_bound
from dovetail.planner.schedules.jit import COMPILED
from dovetail.planner.schedules.listing import search_rules
from dovetail.planner.schedules.periodic import shorter, thicken, thinner, unroll
from dovetail.planner.schedules.problem import Problem, ProblemError, serial_memory
from dovetail.planner.schedules.rungs import ANNEALED_SIZE, CLOSING, LATENCY, MEMORY, NEAR, THINNED, Rung
from dovetail.planner.schedules.schedule import (
    DeadlockError,
    Schedule,
    evaluate,
    mirror,
    timing_arguments,
    unmirror,
)

TASKS = 4
UNLIMITED = 1e300
EXACT_SIZE = 3200  # passes; beyond, CP-SAT takes more memory and time than it is worth
_POLL = 0.05  # seconds
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
    scale: float = 1.0  # work of a round
    exact: bool = True  # ask CP-SAT too
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
    proved: float = 0.0  # no schedule within the problem's own memory limit is faster

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

    def attempt(self, limit: float, target: float, rung: Rung) -> Schedule | None:
        """The fastest schedule within `limit`, stopping at `target`, or None."""
        top: list[Schedule] = []
        if self.best is not None and self.best.peak <= limit * (1 + 1e-9):
            top.append(self.best)
        for number in range(rung.rules + rung.annealing):
            # One round always, so that there is an answer better than a rule's.
            if self.rounds and self.left() <= 0:
                break
            self.rounds += 1
            if number < rung.rules or not top:
                results = self._rules(limit, target, rung.part)
            else:
                results = self._anneal(top, limit, target, rung.part * 2 ** min(number - rung.rules, 3))
            top = sorted([*top, *results], key=_key)[:TASKS]
            self.report("rules" if number < rung.rules else "annealing")
            if top and top[0].makespan <= target * (1 + 1e-9):
                return top[0]
        return top[0] if top else None

    def _rules(self, limit: float, target: float, part: float) -> list[Schedule]:
        tries = min(20000, 1.5e7 / self.size) * self.effort.scale * part if COMPILED else 20
        tries = max(8, int(tries))

        def task(number: int, stop: Ints) -> tuple[float, Ints]:
            use_mirror = self.mirrored is not None and number % 4 != 3
            i = self.mirrored if use_mirror and self.mirrored is not None else self.instance
            words = np.zeros((i.ranks, i.length), np.int64)
            end = search_rules(
                i.duration, i.activation, i.before, i.after, i.position, i.stages, i.total, i.group, i.wait, i.step,
                i.latency, i.split, np.full(i.ranks, limit * (1 + 1e-9)), tries,
                self._seed(number), target, self.unit, stop, number, words,
            )  # fmt: skip
            return float(end), unmirror(words) if use_mirror else words

        found = self._first(self._run(task, TASKS), target)
        return [self.keep(words, "rules") for words in found]

    def _anneal(self, starts: list[Schedule], limit: float, target: float, part: float) -> list[Schedule]:
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
                self._seed(number), stop, number, words,
            )  # fmt: skip
            return float(end), words

        found = self._first(self._run(task, TASKS), target)
        return [self.keep(words, "annealing") for words in found]

    def thinned(self, limit: float, target: float, rung: Rung, most: float = 0.0) -> bool:
        """Whether a schedule of fewer micro-batches of the larger model was found that becomes one of `target` within
        `limit` when its steady part is repeated. `most`: worth keeping on the way, though longer than `target`."""
        for number in range(rung.thin):
            fewer = thinner(self.instance.problem, 2 if number % 3 == 2 else 1)
            if fewer is None or (self.rounds and self.left() <= 0):
                return False
            self.rounds += 1
            instance = family_instance(replace(fewer, memory_limit=None), self.family)
            shift = self.bound - lower_bound(instance)
            effort = replace(self.effort, seconds=self.left(), seed=self._seed(number), progress=None)
            search = _Search(instance, self.family, effort, self.pool)
            for step in THINNED:
                skipped = step.part > rung.part or (step.annealing and search.size > ANNEALED_SIZE)
                short = None if skipped else search.attempt(limit, target - shift, step)
                if short is None or short.makespan + shift > max(target, most) * (1 + 1e-9):
                    continue
                longer = thicken(self.instance, short, limit)
                if longer is not None:
                    found = self.keep(longer, "steady part")
                    self.report("steady part")
                    if found.makespan <= target * (1 + 1e-9):
                        return True
                    most = min(most, found.makespan * (1 - 1e-6))
                if short.makespan + shift <= target * (1 + 1e-9):
                    break
        return False

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
            answer = search.run(work, self._seed(number), stopped=lambda: bool(stop[:number].any() or stop[-1]))
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

    def run(self, known: Sequence[Ints]) -> Schedule | None:
        limit = self.instance.problem.memory_limit
        cap = UNLIMITED if limit is None else limit
        for words in self._starts(cap, known):
            self.keep(words, "rule")
        for rung in LATENCY:
            if self.best is not None and self.best.at_bound:
                break
            self.attempt(cap, self.bound, rung)
            if rung.thin and not (self.best is not None and self.best.at_bound):
                self.thinned(cap, self.bound, rung, UNLIMITED if self.best is None else self.best.makespan)
            near = self.best is None or (not self.best.at_bound and self.best.makespan <= self.bound * NEAR)
            if rung.work and near and self.proved <= self.bound:
                self._prove(cap, self.bound, rung.work, rung.runs)
        if self.best is None:
            return None
        if self.effort.memory:
            self._less_memory(serial_memory(self.instance.problem))
        if self.proved < self.best.makespan:
            self._close(cap)
        return replace(self.best, proved=self.proved)

    def _starts(self, cap: float, known: Sequence[Ints]) -> Iterable[Ints]:
        """Known schedules, and plain 1F1B of one model after the other, where they fit: never worse than those."""
        words = fixed_words(self.instance, Family("overlapped", "", self.instance.coupling))
        for start in (*known, words):
            try:
                if evaluate(self.instance, start).peak <= cap * (1 + 1e-9):
                    yield start
            except DeadlockError:
                continue

    def _prove(self, cap: float, target: float, work: float, runs: int) -> bool:
        """Whether CP-SAT settled it: a schedule of `target`, or the proof that all are slower."""
        answer = self.exact(cap, target, work, runs)
        if answer.impossible:
            unit = time_unit(self.instance)
            if unit is not None:
                self.proved = max(self.proved, unit * (np.floor(target / unit + 1e-6) + 1))
        return answer.impossible or answer.words is not None

    def _close(self, cap: float) -> None:
        """Narrow the gap between what is proved and what was found, while CP-SAT answers."""
        unit = time_unit(self.instance)
        if unit is None:
            return
        while self.best is not None and self.left() > 0:
            low, high = max(self.bound, self.proved), self.best.makespan
            if high <= low * (1 + 1e-9):
                return
            middle = float(max(low, min(high - unit, unit * np.floor((low + high) / 2 / unit + 1e-6))))
            if not any(
                self._prove(cap, target, CLOSING.work, CLOSING.runs) for target in dict.fromkeys((middle, high - unit))
            ):
                return

    def _less_memory(self, serial: float) -> None:
        """Down to serial 1F1B's memory: halve the interval between what failed and what was reached.

        What can be found is often found at once and what can not takes a whole round, so rounds begin small."""
        assert self.best is not None
        target = self.best.makespan
        goal = serial * 1.0045  # 1.00 in two decimals
        impossible = 0.0
        for rung in MEMORY:
            failed = impossible
            while self.left() > 0 and self.best.peak > max(goal, failed * 1.01):
                trial = goal if not failed else (failed + self.best.peak) / 2
                if rung.thin:
                    reached = self.thinned(trial, target, rung)
                elif rung.work:
                    answer = self.exact(trial, target, rung.work, rung.runs)
                    if answer.impossible:
                        impossible = trial
                    reached = answer.words is not None
                else:
                    found = self.attempt(trial, target, rung)
                    reached = found is not None and found.makespan <= target * (1 + 1e-9)
                if not reached:
                    failed = trial
                    if rung.work:  # it takes long to fail, and what it did not settle it rarely settles nearby
                        break


def _key(schedule: Schedule) -> tuple[float, float]:
    # Ends that differ by rounding only are equal.
    return (float(f"{schedule.makespan:.9g}"), schedule.peak)


def _same_shape(instance: Instance, start: Schedule | None) -> Ints | None:
    if start is None or start.words.shape != (instance.ranks, instance.length):
        return None
    counts = np.zeros(6, np.int64)
    for m in (0, 1):
        counts[3 * m : 3 * m + instance.kinds] = instance.total[m]
    same = all((np.bincount(word, minlength=6) == counts).all() for word in start.words)
    return start.words if same else None


def _unrolled(problem: Problem, family: Family, effort: Effort, pool: ThreadPoolExecutor) -> Ints | None:
    """Words from a schedule of fewer micro-batches, which takes a third of the time to find."""
    fewer = shorter(problem, family)
    if fewer is None:
        return None
    part = replace(effort, seconds=effort.seconds / 3)
    found = _Search(family_instance(fewer, family), family, part, pool).run([])
    longer = None if found is None else unroll(problem, family, found)
    return None if longer is None else longer.words


def find(problem: Problem, family: Family, effort: Effort, start: Schedule | None = None) -> Schedule:
    """The family's best schedule within the problem's memory limit: the fastest, of those the one of the lowest peak.

    `start`: a schedule to improve on, as of the same problem with other times; without effect if its words are
    no schedule of this one. Raises ProblemError where nothing within the limit was found."""
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
        known = [
            words
            for words in (_same_shape(instance, start), _unrolled(problem, family, effort, pool))
            if words is not None
        ]
        left = replace(effort, seconds=effort.seconds - (effort.clock() - started))
        best = _Search(instance, family, left, pool).run(known)
    if best is None:
        raise ProblemError(
            f"no {family.name} schedule within a memory limit of {limit:g} was found; serial 1F1B takes "
            f"{serial_memory(problem):g} and one micro-batch at a time {problem.least_memory:g}"
        )
    return replace(best, seconds=effort.clock() - started)
