"""Draws the samples of one iteration on the servers of the fleet. It is one call of `Generator.generate`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.coordinator.samples.dispatch import Speeds, excess, place
from dovetail.coordinator.samples.in_flight import (
    Generated,
    GenerationError,
    GenerationSettings,
    InFlight,
    Work,
    mean_step,
    reason_to_give_up,
    reason_to_leave,
)
from dovetail.coordinator.samples.kv_migration import KVMigration
from dovetail.coordinator.samples.lineup import KIND, Turn
from dovetail.coordinator.samples.migration_costs import Mechanism
from dovetail.coordinator.samples.migrations import Leave, Migration, StopStrings
from dovetail.coordinator.samples.requests import RequestRefused, Requests, ServerFailure, body
from dovetail.coordinator.samples.scoring import Finished
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.experts import reported_tokens
from dovetail.coordinator.store.samples import Assignment, Key, Sample
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, Instance, InstanceHealth
from dovetail.manifest.training_types import Generation
from dovetail.protocol.process.endings import cancel

GATHER_SECONDS = 0.005
# The maximum number of requests that are started at once. Thousands would block the event loop until connections time
# out.
BURST = 256
# The maximum number of samples whose tokens are stored in one turn of the event loop. All samples of a large iteration
# may have new ones in the same moment.
MOST_STORED = 256
TOKEN_BYTES = 4
# So often within `stall` silent requests are looked for.
LOOKS = 10


class DrawingFollower:
    """Follows a drawing. These methods do nothing."""

    def begun(self, drawing: Drawing) -> None:
        """The drawing begins. More samples may be added to it from now on."""

    def waiting(self) -> int:
        """The number of samples that will be added to the drawing. It goes on until there are none."""
        return 0

    def finished(self, samples: Sequence[Finished]) -> None:
        """These samples are stored as generated. Samples that were generated before, or that are stored while the
        drawing is cancelled or fails, are not told. Ask the store for these."""

    def progress(self, done: int, total: int, tokens: int) -> None:
        """Samples and tokens so far. It is called after each flush."""

    def gathers_at(self) -> int:
        """`gather` is asked when so many samples are left, or fewer. With 0 it is never asked."""
        return 0

    def gather(self, unfinished: Sequence[tuple[Key, str | None]], able: Collection[str]) -> Collection[str] | None:
        """The instances on which the remaining samples gather, once it is time. Before that None or nothing. All
        remaining samples then migrate there, as long as one of them lives. `unfinished` has each sample with its
        instance, or with None if it waits for one. `able` may take work."""
        return None


@dataclass
class Shared:
    """The state that the drawings of all iterations share. `clock` returns monotonic seconds. With `replay`, servers
    must report which experts each token used. `leftovers` has for each process the ids of requests that an earlier
    coordinator left there. `step` is the seconds of a decode step in an earlier drawing."""

    store: Store
    fleet: Fleet
    generation: Generation
    log: Callable[..., None]
    settings: GenerationSettings
    clock: Callable[[], float]
    kv: KVMigration
    requests: Requests
    stop_strings: StopStrings
    replay: bool = False
    speeds: Speeds = field(default_factory=Speeds)
    leftovers: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    step: float | None = None


class Drawing:
    """One call of `Generator.generate`. It is used once."""

    def __init__(
        self,
        shared: Shared,
        turn: Turn,
        samples: Sequence[Sample],
        follower: DrawingFollower,
        generation: Generation | None = None,
    ) -> None:
        """`turn` is the iteration that is drawn."""
        self._shared = shared
        self._store, self._fleet, self._log, self._clock = shared.store, shared.fleet, shared.log, shared.clock
        self._settings, self._requests = shared.settings, shared.requests
        self._generation = generation or shared.generation
        self._kv = shared.kv
        self._iteration, self._turn, self._follower = turn.iteration, turn, follower
        self._pending = [Work.of(s, self._generation.max_tokens) for s in samples]
        if shared.replay:
            pieces = self._store.samples.experts(turn.iteration)
            for work in self._pending:
                work.reported = reported_tokens(pieces.get(work.key, ()))
        self._total = len(self._pending)
        self._flying = InFlight(self._store, self._fleet, self._log, self._clock, self._settings, shared.speeds)
        self._wake = asyncio.Event()
        self._migrations: list[Migration] = []
        self._watched = self._looked = 0.0
        # Samples whose requests shall end, and the process of each server when it was last looked at.
        self._ending: dict[Work, None] = {}
        self._processes: dict[str, str | None] = {}
        self._known: set[tuple[str, str]] = set()
        self._destinations: frozenset[str] = frozenset()

    def add(self, sample: Sample, limit: int) -> None:
        """Draw another sample, which is pending, with at most `limit` tokens."""
        self._pending.append(Work.of(sample, limit))
        self._total += 1
        self.wake()

    def wake(self) -> None:
        """Look at once what there is to do."""
        self._wake.set()

    async def run(self) -> Generated:
        """Generate and store every sample. Raises GenerationError or StoreError."""
        result, started = Generated(), self._clock()
        self._turn.draws(self)
        self._follower.begun(self)
        result.tail.append((time.time(), self._total))
        self._fleet.listeners.append(self._wake.set)
        try:
            await self._loop(result)
        finally:
            self._fleet.listeners.remove(self._wake.set)
            await self._stop()
        result.seconds = self._clock() - started
        self._shared.step = mean_step(self._flying.activity.values()) or self._shared.step
        result.migrations, result.instances = self._migrations, dict(self._flying.activity)
        spans = (a.span(name, self._iteration, self._turn.version) for name, a in self._flying.activity.items())
        result.spans = sorted(spans, key=lambda span: span.process)
        return result

    def remaining(self) -> tuple[int, Mapping[str, int]]:
        """The number of samples that wait for a server, and the number on each server."""
        return len(self._pending) + self._follower.waiting(), self._flying.counts

    def on_servers(self) -> dict[str, tuple[int, float]]:
        """By server that has samples: their number, and when its last token came, in monotonic seconds."""
        return {name: (count, self._flying.last_token(name)) for name, count in self._flying.counts.items()}

    def on(self, name: str) -> bool:
        """Whether an instance has samples."""
        return not self._flying.idle(name)

    def idle(self, name: str) -> bool:
        """Whether an instance has nothing to generate. It then gets new samples only if other instances fail."""
        return not self._pending and self._flying.idle(name)

    def left(self, name: str) -> bool:
        """Whether an instance may end, as `Generator.left` defines it."""
        waiting = self._pending if any(i.name != name for i in self._eligible()) else []
        return self._flying.idle(name) and not any(
            work.leave is not None and work.leave.instance == name for work in (*waiting, *self._flying)
        )

    def growing(self) -> list[Growing]:
        """The samples that servers are generating, with their tokens so far."""
        return [Growing(work.key, work.prompt, work.tokens) for work in self._flying]

    async def drain(self, name: str) -> None:
        """Move an instance's samples, with their tokens, to other instances. Returns when it has none left."""
        works = self._flying.on(name)
        self._end(works, "drain")
        tasks = [w.task for w in works if w.task is not None]
        if tasks:
            # `_watch` cancels requests that ignore the abort.
            await asyncio.wait(tasks, timeout=2 * self._settings.abort)

    # ------------------------------------------------------------ the loop

    async def _loop(self, result: Generated) -> None:
        idle_since: float | None = None
        measured, late, streams = self._clock(), False, self._flying.counts
        while self._pending or self._flying or self._follower.waiting():
            self._leave()
            eligible = self._eligible()
            self._greet(eligible)
            self._assign(eligible)
            self._watch()
            now = self._clock()
            if self._flying or eligible or not self._turn.first:
                idle_since = None
            elif idle_since is None:
                idle_since = now
            elif now - idle_since > self._settings.wait:
                raise GenerationError(
                    f"no rollout could take the {len(self._pending)} remaining samples of iteration {self._iteration} "
                    f"within {self._settings.wait:.0f} s: {self._fleet.describe(KIND)}"
                )
            if late:
                await asyncio.sleep(0)
            else:
                # This does not use wait_for, which on Python 3.11 swallows a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.flush):
                        await self._wake.wait()
                # Responses often end together, in the same decode step of a server.
                await asyncio.sleep(GATHER_SECONDS)
                self._wake.clear()
                streams = self._flying.counts
            done = self._flying.flush(MOST_STORED)
            late = self._flying.late
            if not late:
                self._flying.measure(streams, self._clock() - measured)
                measured = self._clock()
            unfinished = self._flying.sort_out()
            if unfinished:
                self._pending = sorted([*self._pending, *unfinished], key=lambda w: w.key)
                result.retries += sum(work.ending is None for work in unfinished)
            self._gather()
            if done:
                result.samples += len(done)
                self._follower.finished(
                    [Finished(w.key, np.array(w.prompt, np.int32), np.array(w.tokens, np.int32)) for w in done]
                )
                result.tail.append((time.time(), len(self._pending) + len(self._flying)))
            result.tokens = sum(a.tokens for a in self._flying.activity.values())
            self._follower.progress(result.samples, self._total, result.tokens)

    def _eligible(self) -> list[Instance]:
        """The instances that may get work. After the tail was gathered these are its destinations, unless all of them
        have failed."""
        everyone = [i for i in self._fleet.eligible(KIND) if self._turn.has(i)]
        return [i for i in everyone if i.name in self._destinations] or everyone

    def _leave(self) -> None:
        """Move samples away from servers that another open iteration has taken over."""
        self._turn.settle()
        for name in list(self._flying.counts):
            if (reason := self._turn.lost(name)) is not None:
                works = [w for w in self._flying.on(name) if w.ending is None]
                if works:
                    self._end(works, reason)

    def _gather(self) -> None:
        """Ask the follower where to gather the remaining samples. When it names destinations, move the samples of all
        other instances there."""
        if self._destinations or not 0 < len(self._pending) + len(self._flying) <= self._follower.gathers_at():
            return
        unfinished = [*((w.key, None) for w in self._pending), *((w.key, w.instance) for w in self._flying)]
        chosen = self._follower.gather(sorted(unfinished, key=lambda u: u[0]), [i.name for i in self._eligible()])
        if chosen:
            self._destinations = frozenset(chosen)
            moving = [w for w in self._flying if w.instance not in self._destinations]
            sources = sorted({w.instance for w in moving})
            self._log("tail.gathered", left=len(unfinished), destinations=sorted(self._destinations), sources=sources)
            self._end(moving, "tail")

    def _greet(self, eligible: Sequence[Instance]) -> None:
        """Prepare a new instance: abort requests that an earlier coordinator left there, and give it a share of the
        work."""
        new = [i for i in eligible if (i.name, i.incarnation) not in self._known]
        first = not self._known
        for instance in new:
            self._known.add((instance.name, instance.incarnation))
            leftovers = self._shared.leftovers.pop((instance.name, instance.incarnation), None)
            if leftovers:
                self._requests.abort(instance, leftovers)
        if new and not first and not self._pending:
            loads = self._flying.loads(eligible)
            idle = [i.name for i in new if loads[i.name] == 0]
            for name, count in excess(loads, idle, self._generation.max_concurrent).items():
                works = [w for w in self._flying.on(name) if w.ending is None]
                # Move the samples with the fewest tokens, because they have the most tokens to come.
                self._end(sorted(works, key=lambda w: len(w.tokens))[:count], "newcomer")

    def _assign(self, eligible: Sequence[Instance]) -> None:
        if not (eligible and self._pending):
            return
        names = [i.name for i in eligible]
        capacity = self._generation.max_concurrent
        count = min(len(self._pending), BURST)
        chosen = place(count, self._flying.loads(eligible), self._flying.speeds(names), capacity)
        works, self._pending = self._pending[: len(chosen)], self._pending[len(chosen) :]
        if not works:
            return
        if len(works) == BURST:
            self._wake.set()
        by_name = {i.name: i for i in eligible}
        assignments = []
        for work, name in zip(works, chosen, strict=True):
            instance = by_name[name]
            keep = self._shared.stop_strings.kept(work.prompt, work.tokens)
            del work.tokens[keep:], work.logprobs[keep:]
            work.stored = work.before = len(work.tokens)
            work.instance, work.incarnation = name, instance.incarnation
            work.ending = work.reason = work.failure = work.refusal = None
            assignments.append(Assignment(work.key, name, instance.incarnation, instance.weight_version, work.stored))
        attempts = self._store.samples.assign(assignments)
        now, wall = self._clock(), time.time()
        left = len(works) + len(self._pending) + len(self._flying)
        interval = self._settings.interval(left, self._shared.step)
        for work, attempt in zip(works, attempts, strict=True):
            work.attempt, work.interval = attempt, interval
            self._flying.begin(work, now, wall)
            work.task = asyncio.create_task(self._run(work, by_name[work.instance]))

    async def _run(self, work: Work, instance: Instance) -> None:
        def on_tokens(tokens: array[int], logprobs: array[float], reason: str | None, experts: bytes | None) -> None:
            now = self._clock()
            if work.first and len(tokens):
                sent = self._kv.nbytes
                self._started(work, instance, now, arrived(), self._kv.nbytes - sent)
            else:
                work.steps, work.spent = work.steps + len(tokens), work.spent + now - work.last_token
            self._flying.changed(work, now)
            work.tokens += tokens
            work.logprobs += logprobs
            work.last_token, work.reason, work.experts = now, reason, experts

        departure, work.departure = work.departure, None
        try:
            room = int(instance.abilities.get("max_model_len") or 2**31) - len(work.prompt) - len(work.tokens)
            left = min(work.limit - len(work.tokens), room)
            if left < 1:
                # Either the response is complete but an earlier coordinator died before it was stored, or the context
                # is full.
                work.reason = "length"
                return
            request = body(work, self._generation, instance, left, self._shared.replay)
            arrived = await self._kv.prepare(self._requests.session, request, instance, departure, bool(work.tokens))
            await self._requests.draw(instance, request, on_tokens)
            if work.reason == "abort" and len(work.tokens) > work.before:
                work.departure = self._kv.left(instance, work.request_id)
        except ServerFailure as error:
            work.failure = str(error)
        except RequestRefused as error:
            work.refusal = str(error)
        finally:
            self._flying.ended(work)
            self._wake.set()

    def _started(
        self, work: Work, instance: Instance, now: float, moved: tuple[Mechanism, float] | None, nbytes: int
    ) -> None:
        """Record the time to a request's first token, after a prefill or a migration. `nbytes` bytes of KV cache were
        moved."""
        work.first = False
        tokens = len(work.prompt) + len(work.tokens)
        mechanism = Mechanism.TOKENS if moved is None else moved[0]
        if mechanism is Mechanism.TOKENS:
            nbytes = TOKEN_BYTES * tokens
            activity = self._flying.activity[instance.name]
            activity.prefilled(work.begun, tokens, now - work.begun)
            activity.again += tokens if work.tokens else 0
        leave, work.leave = work.leave, None
        if leave is not None and leave.instance != instance.name:
            names = leave.instance, instance.name, mechanism.value, leave.reason
            migration = Migration(work.key, *names, tokens, nbytes, now - leave.time, time.time())
            self._migrations.append(migration)
            self._log("sample.moved", **migration.fields())

    def _watch(self) -> None:
        """End requests that stall, that lost their process, or that ignored an abort. Move samples away from servers
        that will end soon or seem to be dead."""
        now, s = self._clock(), self._settings
        if now - self._watched < s.flush:
            return
        self._watched = now
        # Silent requests are looked for less often, because that takes a look at every sample.
        silent = now - self._looked > s.stall / LOOKS
        if silent:
            self._looked = now
        fleet = {i.name: i for i in self._fleet.instances(KIND)}
        eligible = {i.name for i in self._eligible()}
        for name in list(self._flying.counts):
            instance, quiet = fleet.get(name), now - self._flying.last_token(name)
            if (reason := reason_to_leave(instance, quiet, bool(eligible - {name}), s)) is not None:
                self._end(self._flying.on(name), reason)
            gone = instance is None or instance.health is InstanceHealth.DEAD
            process = None if instance is None else instance.incarnation
            if silent or gone or self._processes.get(name) != process:
                self._give_up(self._flying.on(name), fleet, now)
            self._processes[name] = process
        self._ending = {work: None for work in self._ending if work in self._flying}
        self._give_up(self._ending, fleet, now)

    def _give_up(self, works: Iterable[Work], fleet: Mapping[str, Instance], now: float) -> None:
        for work in works:
            if work.task is None or work.task.done():
                continue
            last = self._flying.last_token(work.instance)
            failure = reason_to_give_up(work, fleet.get(work.instance), now, last, self._settings)
            if failure is not None:
                work.failure = failure or work.failure
                work.task.cancel()

    # ------------------------------------------------------------ inner parts

    def _end(self, works: Sequence[Work], reason: str) -> None:
        """Ask servers to abort requests. Their samples then continue on other servers."""
        works = [w for w in works if w.ending is None and w.reason is None]
        self._store.samples.migrate([(w.key, w.attempt) for w in works])
        now = self._clock()
        by_instance: dict[str, list[str]] = {}
        for work in works:
            work.ending, work.leave = now, Leave(work.instance, reason, now)
            self._ending[work] = None
            by_instance.setdefault(work.instance, []).append(work.request_id)
        for name, ids in by_instance.items():
            instance = self._fleet.get(name)
            if instance is not None:
                self._requests.abort(instance, ids)

    async def _stop(self) -> None:
        """End all running requests. Their tokens are stored, and their samples become pending again."""
        flying = list(self._flying)
        await cancel([w.task for w in flying if w.task is not None])
        try:
            if flying:
                self._flying.flush()
                self._store.samples.release([(w.key, w.attempt) for w in self._flying])
        except StoreError as error:
            self._log("generation.unsaved", error=str(error))
        self._flying.clear()
        self._pending.clear()
