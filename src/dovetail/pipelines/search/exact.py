"""Asks CP-SAT (OR-Tools) whether there is a schedule of this makespan within this memory.

Unlike the other searches, CP-SAT can prove that there is none. Micro-batches pass every stage in order. Memory is a
cumulative constraint from the start of a forward to the end of its backward. OR-Tools is an optional dependency
(`dovetail-rlhf[schedules]`); `available` says whether it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.pipelines.instance import SearchInstance
from dovetail.pipelines.simulate import KINDS, B, F, Ints, W

_SCALES = (1, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100, 1000, 10_000)
_TIMES, _SIZES = 1e6, 1e4
"""The numbers of steps that divide the target and the limit, if values have no common unit."""


def available() -> bool:
    """Whether OR-Tools is installed."""
    return importlib.util.find_spec("ortools") is not None


@dataclass(frozen=True)
class Proof:
    """`orders`: those of a schedule, or None. `impossible`: it is proved that there is none."""

    orders: Ints | None
    impossible: bool = False


class ExactSearch:
    """One question to CP-SAT. Another thread may call `stop` while `run` is running. Then `run` ends soon.

    `target`: the largest makespan allowed. `limit`: the largest activation memory of a rank, or None. Times without a
    common unit are rounded up to a millionth of the target, and sizes to a ten-thousandth of the limit. What is then
    found is valid, but nothing is proved."""

    def __init__(self, instance: SearchInstance, target: float, limit: float | None) -> None:
        from ortools.sat.python import cp_model

        self.instance, self._api = instance, cp_model
        self._model: Any = cp_model.CpModel()
        self._solver: Any = cp_model.CpSolver()
        self._start: dict[tuple[int, int, int, int], Any] = {}
        scale, self._exact = _scale(_times(instance), target, _TIMES)
        self._length = _up(instance.duration * scale)
        self._latency = _up(instance.latency * scale)
        self._step = _up(instance.step * scale)
        self._target = int(np.floor(target * scale + 1e-6))
        self._windows = [self._window(m) for m in range(len(instance.problem.models))]
        if any(low > high for windows in self._windows for low, high in windows.values()):
            self._model.add_bool_or([])
            return
        for windows in self._windows:
            for key, (low, high) in windows.items():
                self._start[key] = self._model.new_int_var(low, high, "")
        for m in range(len(instance.problem.models)):
            for chunk, rank in instance.nodes(m):
                self._precedence(chunk, rank)
        self._barriers()
        for rank in range(instance.ranks):
            self._rank(rank, limit)

    def run(self, work: float, seed: int, stopped: Callable[[], bool] = lambda: False) -> Proof:
        """The answer, by one thread. `work`: the limit in CP-SAT's deterministic seconds. Each of them takes some
        seconds of a core.

        Equal arguments give equal answers, unless `stopped` or `stop` ends the run."""
        if stopped():
            return Proof(None)
        p = self._solver.parameters
        p.num_workers, p.random_seed, p.max_deterministic_time = 1, seed % (2**31 - 1), work
        status = self._solver.solve(self._model)
        if status in (self._api.OPTIMAL, self._api.FEASIBLE):
            return Proof(self._orders())
        return Proof(None, impossible=self._exact and status == self._api.INFEASIBLE)

    def stop(self) -> None:
        self._solver.stop_search()

    def _window(self, m: int) -> dict[tuple[int, int, int, int], tuple[int, int]]:
        """The earliest and the latest start of each of a model's passes, as if it ran alone, by chunk, kind, rank and
        micro-batch.

        One recursion gives both: the latest starts are those of the problem run backwards in time."""
        i, nodes = self.instance, self.instance.nodes(m)
        count = int(i.total[i.chunks(m).start])
        length = self._length
        earliest, latest = np.zeros_like(length), np.zeros_like(length)
        for q in range(count):
            # Backwards in time the last micro-batch comes first.
            p = count - 1 - q
            for c, rank in nodes:
                low = earliest[c, F, rank, q - 1] + length[c, F, rank, q - 1] if q else 0
                b, back = i.before[c, rank]
                if back >= 0:
                    low = max(low, earliest[b, F, back, q] + length[b, F, back, q] + self._latency[c, F, rank])
                earliest[c, F, rank, q] = low
                if i.split:
                    after = latest[c, W, rank, p + 1] if q else self._target
                    latest[c, W, rank, p] = after - length[c, W, rank, p]
                high = latest[c, W, rank, p] if i.split else self._target
                high = min(high, latest[c, B, rank, p + 1]) if q else high
                if back >= 0:
                    high = min(high, latest[b, B, back, p] - self._latency[b, B, back])
                latest[c, B, rank, p] = high - length[c, B, rank, p]
            for c, rank in nodes[::-1]:
                a, onward = i.after[c, rank]
                low = earliest[c, B, rank, q - 1] + length[c, B, rank, q - 1] if q else 0
                high = latest[c, F, rank, p + 1] if q else self._target
                if onward >= 0:
                    low = max(low, earliest[a, B, onward, q] + length[a, B, onward, q] + self._latency[c, B, rank])
                    high = min(high, latest[a, F, onward, p] - self._latency[a, F, onward])
                else:
                    low = max(low, earliest[c, F, rank, q] + length[c, F, rank, q])
                    high = min(high, latest[c, B, rank, p])
                earliest[c, B, rank, q] = low
                latest[c, F, rank, p] = high - length[c, F, rank, p]
                if i.split:
                    before = earliest[c, W, rank, q - 1] + length[c, W, rank, q - 1] if q else 0
                    earliest[c, W, rank, q] = max(before, low + length[c, B, rank, q])
        return {
            (c, kind, rank, q): (int(earliest[c, kind, rank, q]), int(latest[c, kind, rank, q]))
            for c, rank in nodes
            for kind in range(i.kinds)
            for q in range(count)
        }

    def _end(self, m: int, kind: int, rank: int, q: int) -> Any:
        return self._start[m, kind, rank, q] + int(self._length[m, kind, rank, q])

    def _precedence(self, c: int, rank: int) -> None:
        i, add = self.instance, self._model.add
        (b, back), (a, onward) = i.before[c, rank].tolist(), i.after[c, rank].tolist()
        for q in range(int(i.total[c])):
            for kind in range(i.kinds):
                if q:
                    add(self._start[c, kind, rank, q] >= self._end(c, kind, rank, q - 1))
            if back >= 0:
                add(self._start[c, F, rank, q] >= self._end(b, F, back, q) + int(self._latency[c, F, rank]))
            if onward >= 0:
                add(self._start[c, B, rank, q] >= self._end(a, B, onward, q) + int(self._latency[c, B, rank]))
            else:
                add(self._start[c, B, rank, q] >= self._end(c, F, rank, q))
            if i.split:
                add(self._start[c, W, rank, q] >= self._end(c, B, rank, q))

    def _barriers(self) -> None:
        """A mini-batch's first forward waits for the mini-batches of `wait` and their optimizer steps."""
        i, last, chunks = self.instance, self.instance.kinds - 1, range(len(self.instance.total))
        closed: dict[tuple[int, int], Any] = {}
        for c in chunks:
            for k in range(i.wait.shape[1]):
                for other in chunks:
                    need = int(i.wait[c, k, other])
                    if not need:
                        continue
                    if (other, need) not in closed:
                        closed[other, need] = self._model.new_int_var(0, self._target, "")
                        for rank in range(i.ranks):
                            end = self._end(other, last, rank, need * int(i.group[other]) - 1)
                            self._model.add(closed[other, need] >= end)
                    for rank in range(i.ranks):
                        start = self._start[c, F, rank, k * int(i.group[c])]
                        self._model.add(start >= closed[other, need] + int(self._step[other]))

    def _rank(self, rank: int, limit: float | None) -> None:
        """A rank runs one pass at a time and holds at most `limit` of activations."""
        i, model = self.instance, self._model
        chunks = range(len(i.total))
        sizes = np.concatenate([i.activation[c, rank, : int(i.total[c])] for c in chunks])
        memory = _scale(np.append(sizes, limit), limit, _SIZES) if limit is not None and limit > 0 else None
        busy, held, demands = [], [], []
        for c in chunks:
            for q in range(int(i.total[c])):
                for kind in range(i.kinds):
                    start, length = self._start[c, kind, rank, q], int(self._length[c, kind, rank, q])
                    busy.append(model.new_fixed_size_interval_var(start, length, ""))
                if memory is not None:
                    least = sum(int(self._length[c, kind, rank, q]) for kind in range(i.kinds))
                    span = model.new_int_var(least, self._target, "")
                    end = self._end(c, i.kinds - 1, rank, q)
                    held.append(model.new_interval_var(self._start[c, F, rank, q], span, end, ""))
                    demands.append(int(_up(i.activation[c, rank, q] * memory[0])))
        model.add_no_overlap(busy)
        if memory is not None and limit is not None:
            self._exact &= memory[1]
            model.add_cumulative(held, demands, int(np.floor(limit * memory[0] + 1e-6)))

    def _orders(self) -> Ints:
        ordered: list[list[tuple[int, int, int]]] = [[] for _ in range(self.instance.ranks)]
        for (c, kind, rank, q), start in self._start.items():
            ordered[rank].append((self._solver.value(start), q, KINDS * c + kind))
        return np.array([[code for _, _, code in sorted(row)] for row in ordered], dtype=np.int64)


def time_unit(instance: SearchInstance) -> float | None:
    """A unit of which all times, and so every makespan, are multiples. None if there is none."""
    scale, exact = _scale(_times(instance), 1.0, _TIMES)
    return 1 / scale if exact else None


def _times(instance: SearchInstance) -> Any:
    return np.concatenate([instance.duration.ravel(), instance.latency.ravel(), instance.step])


def _scale(values: Any, largest: float, steps: float) -> tuple[float, bool]:
    """A factor that makes all `values` whole numbers, and True. If there is none, a factor that gives them enough
    digits, and False."""
    for scale in _SCALES:
        scaled = values * scale
        if (np.abs(scaled - np.round(scaled)) <= 1e-6).all():
            return float(scale), True
    return steps / largest, False


def _up(values: Any) -> Any:
    return np.ceil(values - 1e-6).astype(np.int64)
