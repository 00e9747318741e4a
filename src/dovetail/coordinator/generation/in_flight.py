"""The samples that servers work on: their new tokens stored, their ends sorted, their instances' doings counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from dovetail.coordinator.fleet.fleet import Fleet, Instance
from dovetail.coordinator.generation.dispatch import Speeds
from dovetail.coordinator.generation.migrations import Leave
from dovetail.coordinator.generation.work import Activity, Work
from dovetail.coordinator.store.samples import Delta, Key
from dovetail.coordinator.store.store import Store, StoreError

FINISHED = ("stop", "length", "repetition")


class GenerationError(Exception):
    """Generation cannot go on; the message says what it waits for or what a server refused."""


class InFlight:
    """`activity`: by instance, since `clear`. `clock`: monotonic seconds. `max_fruitless`: see `Settings`."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        log: Callable[..., None],
        clock: Callable[[], float],
        max_fruitless: int,
    ) -> None:
        self._store, self._fleet, self._log, self._clock = store, fleet, log, clock
        self._max_fruitless = max_fruitless
        self._works: dict[Work, None] = {}
        self._counts: Counter[str] = Counter()
        self._ended: list[Work] = []
        self._speeds = Speeds()
        self.activity: dict[str, Activity] = {}

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._works)

    def on(self, name: str) -> list[Work]:
        """Those of one instance."""
        return [w for w in self._works if w.instance == name]

    def loads(self, instances: Sequence[Instance]) -> dict[str, int]:
        """Requests on each."""
        return {i.name: self._counts[i.name] for i in instances}

    def idle(self, name: str) -> bool:
        """Whether an instance has none."""
        return not self._counts[name]

    def speeds(self, names: Sequence[str]) -> dict[str, float]:
        """Relative ones."""
        return self._speeds.relative(names)

    def begin(self, work: Work, now: float, wall: float) -> None:
        """An instance was given a sample; `wall`: seconds since the epoch."""
        work.heard, work.begun, work.first = now, now, True
        self._works[work] = None
        self._counts[work.instance] += 1
        self.activity.setdefault(work.instance, Activity(wall, wall)).end = wall

    def ended(self, work: Work) -> None:
        """Its request is over, for whatever reason: `sort_out` will see."""
        self._ended.append(work)

    def _remove(self, work: Work) -> None:
        del self._works[work]
        self._counts[work.instance] -= 1

    def clear(self) -> None:
        self._works.clear()
        self._counts.clear()
        self._ended.clear()

    def flush(self, seconds: float) -> list[Key]:
        """Store what came in since the last flush, `seconds` ago; returns the samples that are finished by it.

        Raises StoreError."""
        deltas: list[Delta] = []
        works: list[Work] = []
        streams = +self._counts
        for work in self._works:
            if work.steps:
                self.activity[work.instance].decoded(streams[work.instance], work.steps, work.spent)
                work.steps, work.spent = 0, 0.0
            reason = work.reason if work.reason in FINISHED else None
            if len(work.tokens) > work.stored or reason is not None:
                tokens, logprobs = work.tokens[work.stored :], work.logprobs[work.stored :]
                deltas.append(Delta(work.key, work.attempt, work.stored, tokens, logprobs, reason))
                works.append(work)
        if deltas and not all(self._store.samples.record(deltas)):
            raise StoreError("the store refused tokens of a current request; is a second coordinator at work?")
        done, wall = [], time.time()
        for work, delta in zip(works, deltas, strict=True):
            activity, new = self.activity[work.instance], len(delta.tokens)
            activity.end = wall
            activity.tokens, activity.fresh = activity.tokens + new, activity.fresh + new
            work.stored = len(work.tokens)
            if delta.finish_reason is not None:
                done.append(work.key)
                activity.samples += 1
                self._remove(work)
                self._fleet.succeeded(work.instance)
        for name, n in streams.items():
            self._speeds.measured(name, self.activity[name].fresh, n, seconds)
            self.activity[name].fresh = 0
        return done

    def sort_out(self) -> list[Work]:
        """After a flush: those whose request ended without finishing them are pending again.

        Raises GenerationError when a server refused one, or when one never gets a token."""
        ended, self._ended = self._ended, []
        unfinished = [w for w in ended if w in self._works]
        for work in unfinished:
            self._remove(work)
            if work.refusal is not None:
                self._store.samples.release([(work.key, work.attempt)])
                raise GenerationError(f"{work.instance} refused {work.name}: {work.refusal}")
            asked = work.ending is not None
            if not asked:
                work.leave = Leave(work.instance, "failure", self._clock())
                failure = work.failure or f"it ended a request with reason {work.reason}"
                self._fleet.failed(work.instance, failure)
                self._log("sample.retried", sample=list(work.key), instance=work.instance, reason=failure)
            work.fruitless = 0 if len(work.tokens) > work.before or asked else work.fruitless + 1
            if work.fruitless >= self._max_fruitless:
                self._store.samples.release([(work.key, work.attempt)])
                raise GenerationError(
                    f"{work.name} got no token in {work.fruitless} attempts; "
                    f"the last, on {work.instance}: {work.failure or 'it was aborted'}"
                )
        if unfinished:
            self._store.samples.release([(w.key, w.attempt) for w in unfinished])
        return unfinished
