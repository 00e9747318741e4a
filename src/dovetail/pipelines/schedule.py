"""A schedule: words, their times and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dovetail.pipelines.instance import KINDS, Instance, Ints, lower_bound
from dovetail.pipelines.problem import Floats
from dovetail.pipelines.timing import run_words, word_peak


class Pass(NamedTuple):
    """One forward (F), backward (B), input gradient (I) or weight gradient (W) on a rank."""

    rank: int
    model: str
    pipeline: int
    stage: int
    micro_batch: int  # through all mini-batches
    kind: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Schedule:
    """Words (N, length) with their evaluation; shorter ones end in -1. `how`: what found it. `proved`: no schedule of
    the family within the problem's memory limit is faster."""

    family: str
    instance: Instance
    words: Ints
    finish: Floats  # (2, 3, N, Q)
    makespan: float
    peaks: Floats  # (N,)
    how: str = "rule"
    seed: int = 0
    seconds: float = 0.0
    proved: float = 0.0

    @property
    def peak(self) -> float:
        return float(self.peaks.max())

    @property
    def bound(self) -> float:
        """The family's lower bound on the makespan, or what was proved beyond it."""
        return max(lower_bound(self.instance), self.proved)

    @property
    def at_bound(self) -> bool:
        return self.makespan <= self.bound * (1 + 1e-9)

    def passes(self) -> Iterator[Pass]:
        """Every rank's passes in their order."""
        i, models = self.instance, self.instance.problem.models
        for rank in range(i.ranks):
            count = [0] * (2 * KINDS)
            for code in (int(code) for code in self.words[rank] if code >= 0):
                m, kind, q = code // KINDS, code % KINDS, count[code]
                count[code] += 1
                end = float(self.finish[m, kind, rank, q])
                pipeline, stage = models[m].ranks.index(rank) // models[m].stages, int(i.position[m, rank])
                letter = ("FIW" if i.split else "FB")[kind]
                start = end - float(i.duration[m, kind, rank, q])
                yield Pass(rank, models[m].name, pipeline, stage, q, letter, start, end)


class DeadlockError(ValueError):
    """Words that never finish."""


def evaluate(instance: Instance, words: Ints, family: str = "", how: str = "rule") -> Schedule:
    """Times and memory of words; raises DeadlockError where they cannot run to their end."""
    finish = np.zeros_like(instance.duration)
    makespan = run_words(words, words.shape[1], *timing_arguments(instance), finish)
    if makespan < 0:
        raise DeadlockError("the words deadlock")
    peaks = [word_peak(words[x], words.shape[1], x, instance.activation, instance.split) for x in range(instance.ranks)]
    return Schedule(family, instance, words, finish, float(makespan), np.array(peaks), how)


def timing_arguments(i: Instance) -> tuple[object, ...]:
    """What `run_words` and `anneal` take between the words and their own arguments."""
    return (i.duration, i.before, i.after, i.total, i.group, i.wait, i.step, i.latency, i.split)


def mirror(instance: Instance) -> Instance:
    """The instance run backwards in time: the first kind of passes and the last change places. Only where barriers look
    alike from both ends."""
    duration, activation = np.zeros_like(instance.duration), np.zeros_like(instance.activation)
    latency, last = np.zeros_like(instance.latency), instance.kinds - 1
    for m in (0, 1):
        n = int(instance.total[m])
        for kind in range(instance.kinds):
            duration[m, kind, :, :n] = instance.duration[m, last - kind, :, :n][:, ::-1]
        for rank in range(instance.ranks):
            if (back := instance.before[m, rank]) >= 0:
                latency[m, 0, rank] = instance.latency[m, 1, back]
            if (onward := instance.after[m, rank]) >= 0:
                latency[m, 1, rank] = instance.latency[m, 0, onward]
        activation[m, :, :n] = instance.activation[m, :, :n][:, ::-1]
    return replace(instance, duration=duration, activation=activation, latency=latency, mirrored=True)


_SWAPPED = {2: np.array([1, 0, 2, 4, 3, 5]), 3: np.array([2, 1, 0, 5, 4, 3])}


def unmirror(instance: Instance, words: Ints) -> Ints:
    """The words of the mirrored instance's schedule, for the instance itself."""
    return np.ascontiguousarray(_SWAPPED[instance.kinds][words[:, ::-1]])
