"""Simulates generation on many instances, event by event. Every sample's end is exact for the given step times."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from copy import copy

from dovetail.fusion.profile import StageProfile

ARRIVAL = -1
ROUNDING = 1e-9


class Decode:
    """The state of generation. Samples are dealt as the coordinator deals them, one by one to the instance with the
    least load for its speed. An instance gets at most `max_samples`. The others wait, and go to the first instance with
    room.

    A sample also waits if the instance's KV cache has no room for its full length. (vLLM would preempt it, at about the
    same cost.) A prefill holds up the other samples of its instance, and makes the first token. Samples join between
    two steps.

    `lengths`, `prompts`: tokens of each sample's response and prompt. `profiles`: one for each instance. `now`: the
    time of the last event. `end`: when each sample ended. `owner`: the instance of each sample. `busy`: how long each
    instance worked. `idle_at`: when each instance last had no samples left. Times are seconds since the stage began."""

    def __init__(self, lengths: Sequence[int], prompts: Sequence[int], profiles: Sequence[StageProfile]) -> None:
        self.lengths, self.prompts, self.profiles = lengths, prompts, profiles
        count, instances = len(lengths), len(profiles)
        self.now = 0.0
        self.remaining = count
        self.end = [0.0] * count
        self.owner: list[int | None] = [None] * count
        self.busy = [0.0] * instances
        self.idle_at = [0.0] * instances
        self._clock = [0.0] * instances  # the time at which `_step` steps were done
        self._step = [0] * instances
        self._base = [0] * count  # the instance's step at which the response was empty
        self._running: list[list[tuple[int, int]]] = [[] for _ in profiles]  # heaps of (last step, sample)
        self._waiting: list[deque[tuple[int, int]]] = [deque() for _ in profiles]  # (sample, tokens it has)
        self._arriving: list[list[tuple[int, int]]] = [[] for _ in profiles]
        self._kv = [0] * instances
        self._version = [0] * instances
        self._events: list[tuple[float, int, int]] = []
        self._pending: deque[int] = deque(self._deal())
        for i in range(instances):
            self._admit(i)

    def _deal(self) -> list[int]:
        share = -(-len(self.lengths) // len(self.profiles))
        speeds = [1 / p.steps[min(share, p.max_samples)] for p in self.profiles]
        heap = [(1 / s, i, 1) for i, s in enumerate(speeds)]
        heapq.heapify(heap)
        for sample in range(len(self.lengths)):
            if not heap:
                return list(range(sample, len(self.lengths)))
            _, i, load = heapq.heappop(heap)
            self._waiting[i].append((sample, 0))
            self.owner[sample] = i
            if load < self.profiles[i].max_samples:
                heapq.heappush(heap, ((load + 1) / speeds[i], i, load + 1))
        return []

    def copy(self) -> Decode:
        """A copy that goes on independently."""
        other = copy(self)
        for name in ("end", "owner", "busy", "idle_at", "_clock", "_step", "_base", "_kv", "_version", "_events"):
            setattr(other, name, list(getattr(self, name)))
        other._running = [list(h) for h in self._running]
        other._waiting = [deque(w) for w in self._waiting]
        other._arriving = [list(a) for a in self._arriving]
        other._pending = deque(self._pending)
        return other

    def run(self, remaining: int) -> None:
        """Go on until at most `remaining` samples are unfinished."""
        while self.remaining > remaining:
            time, i, version = heapq.heappop(self._events)
            if version == ARRIVAL:
                self._arrive(i, time)
            elif version == self._version[i]:
                self.now = time
                last = self._running[i][0][0]
                self.busy[i] += time - self._clock[i]
                self._clock[i], self._step[i] = time, last
                self._complete(i)

    def unfinished(self) -> list[tuple[int, int | None]]:
        """The unfinished samples in order, each with its instance, or None if it waits for one."""
        owners: dict[int, int | None] = dict.fromkeys(self._pending)
        for i, running in enumerate(self._running):
            owners.update((s, i) for _, s in running)
            owners.update((s, i) for s, _ in self._waiting[i])
        return sorted(owners.items())

    def migrate(self, moves: dict[int, int]) -> None:
        """Move samples at the time `now`. `moves`: the destination of each sample that moves."""
        had: dict[int, int] = {}
        for i in {self.owner[s] for s in moves} - {None}:
            assert i is not None
            steps = self._steps_done(i, self.now)
            for _, sample in self._running[i]:
                if sample in moves:
                    # A sample that ends at this very moment still lacks its last token.
                    had[sample] = min(self._step[i] + steps - self._base[sample], self.lengths[sample] - 1)
            had.update((s, n) for s, n in self._waiting[i] if s in moves)
            self._running[i] = [r for r in self._running[i] if r[1] not in moves]
            self._waiting[i] = deque(w for w in self._waiting[i] if w[0] not in moves)
            heapq.heapify(self._running[i])
            if not self._running[i] and not self._waiting[i]:
                self.busy[i] += max(0.0, self.now - self._clock[i])
                self.idle_at[i] = self._clock[i] = max(self.now, self._clock[i])
                self._version[i] += 1
        self._pending = deque(s for s in self._pending if s not in moves)
        for sample, i in moves.items():
            if not self._arriving[i]:
                heapq.heappush(self._events, (self.now + self.profiles[i].migration_seconds, i, ARRIVAL))
            self._arriving[i].append((sample, had.get(sample, 0)))
            self.owner[sample] = i

    # ------------------------------------------------------------ inner parts

    def _steps_done(self, i: int, time: float) -> int:
        """The number of whole steps since the instance's clock. It is 0 while the instance prefills."""
        step = self.profiles[i].steps[len(self._running[i])]
        return max(0, math.floor((time - self._clock[i]) / step + ROUNDING))

    def _arrive(self, i: int, time: float) -> None:
        self.now = max(self.now, time)
        if self._running[i]:
            step = self.profiles[i].steps[len(self._running[i])]
            steps = max(0, math.ceil((time - self._clock[i]) / step - ROUNDING))
            self.busy[i] += steps * step
            self._clock[i] += steps * step
            self._step[i] += steps
        else:
            self._clock[i] = max(self._clock[i], time)
        self._waiting[i] += self._arriving[i]
        self._arriving[i] = []
        self._complete(i)

    def _complete(self, i: int) -> None:
        """At the end of a step, remove the samples that are complete, and admit samples that wait."""
        running, step, time = self._running[i], self._step[i], self._clock[i]
        while running and running[0][0] <= step:
            _, sample = heapq.heappop(running)
            self.end[sample] = time
            self._kv[i] -= self.prompts[sample] + self.lengths[sample]
            self.remaining -= 1
            if self._pending:
                new = self._pending.popleft()
                self.owner[new] = i
                self._waiting[i].append((new, 0))
        self._admit(i)

    def _admit(self, i: int) -> None:
        profile, running, waiting = self.profiles[i], self._running[i], self._waiting[i]
        while waiting and len(running) < profile.max_samples:
            sample, had = waiting[0]
            need = self.prompts[sample] + self.lengths[sample]
            if running and profile.kv_tokens is not None and self._kv[i] + need > profile.kv_tokens:
                break
            waiting.popleft()
            tokens = self.prompts[sample] + had
            seconds, prefill = profile.moving_seconds(tokens) if had else (0.0, True)
            if not had:
                seconds = tokens * profile.prefill_seconds_per_token
            seconds += profile.request_seconds
            self._clock[i] += seconds
            self.busy[i] += seconds
            self._kv[i] += need
            self._base[sample] = self._step[i] - had - prefill
            heapq.heappush(running, (self._base[sample] + self.lengths[sample], sample))
        self._version[i] += 1
        if running:
            time = self._clock[i] + (running[0][0] - self._step[i]) * profile.steps[len(running)]
            heapq.heappush(self._events, (time, i, self._version[i]))
        else:
            self.idle_at[i] = self._clock[i]
