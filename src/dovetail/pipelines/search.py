"""The search: latency first, then memory at that latency (in place of RLHFuse's annealing, section 5.2).

1. Random priority rules for a list scheduler, on the problem and on its mirror image in time.
2. From the best of those: where backwards are split, justification, which lists passes anew from both ends in turn;
   annealing on the critical path, under a hard limit of activation memory.
   Many micro-batches: from the schedule of a few, its steady part repeated.
3. CP-SAT, where OR-Tools is installed, on what these do not reach; it also proves that nothing is faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from dovetail.pipelines.dedicated import dedicated
from dovetail.pipelines.exact import time_unit
from dovetail.pipelines.families import DEDICATED, Family, family_instance, fixed_words
from dovetail.pipelines.instance import Instance, Ints, lower_bound
from dovetail.pipelines.periodic import shorter, thicken, thinner, unroll
from dovetail.pipelines.problem import Problem, ProblemError, serial_memory
from dovetail.pipelines.rounds import UNLIMITED, Effort, Rounds, rank
from dovetail.pipelines.rungs import CLOSING, LATENCY, MEMORY, NEAR, POLISH, SPARES, SPLIT_LATENCY, THINNED, Rung
from dovetail.pipelines.schedule import DeadlockError, Schedule, evaluate

__all__ = ["Effort", "find"]


class _Search(Rounds):
    def thinned(self, limit: float, target: float, rung: Rung, most: float = 0.0) -> bool:
        """Whether a schedule of fewer micro-batches of the larger model was found that becomes one of `target` within
        `limit` when its steady part is repeated. `most`: worth keeping on the way, though longer than `target`."""
        for number in range(rung.thin):
            fewer = thinner(self.instance.problem, SPARES[number % len(SPARES)])
            if self.rounds and self.left() <= 0:
                return False
            if fewer is None:
                continue
            self.rounds += 1
            instance = family_instance(replace(fewer, memory_limit=None), self.family)
            shift = self.bound - lower_bound(instance)
            effort = replace(self.effort, seconds=self.left(), seed=self.seed(number), progress=None)
            search = Rounds(instance, self.family, effort, self.pool)
            for step in THINNED:
                near = search.best is not None and search.best.makespan + shift <= target * step.near
                if step.part > rung.part or (step.annealing and not near):
                    continue
                short = search.attempt(limit, target - shift, step)
                if short is None or short.makespan + shift > max(target, most) * (1 + 1e-9):
                    continue
                longer = thicken(self.instance, short, limit)
                if longer is not None:
                    found = self.keep(longer, "steady part")
                    self.report("steady part")
                    if found.makespan > target * (1 + 1e-9) and found.makespan <= target * POLISH:
                        found = min([found, *self.anneal([found], limit, target, step.part)], key=rank)
                    if found.makespan <= target * (1 + 1e-9):
                        return True
                    most = min(most, found.makespan * (1 - 1e-6))
                if short.makespan + shift <= target * (1 + 1e-9):
                    break
        return False

    def run(self, known: Sequence[Ints]) -> Schedule | None:
        limit = self.instance.problem.memory_limit
        cap = UNLIMITED if limit is None else limit
        for words in self._starts(cap, known):
            self.keep(words, "rule")
        for rung in SPLIT_LATENCY if self.family.split else LATENCY:
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
        """Down to serial 1F1B's memory, or what is enough: halve the interval between what failed and what was reached.

        What can be found is often found at once and what can not takes a whole round, so rounds begin small."""
        assert self.best is not None
        target = self.best.makespan
        goal = max(serial * 1.0045, self.effort.enough)  # 1.00 in two decimals
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
    started = effort.clock()
    if family is DEDICATED:
        return replace(dedicated(problem), seconds=effort.clock() - started)
    instance = family_instance(problem, family)
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
