"""Generates an iteration's samples on the servers of the fleet, whatever happens to these.

Tokens are stored as they stream in. A sample must leave its server when the server dies, stalls, aborts the request, is
drained, or has too few samples left (the long tail, RLHFuse section 4). It continues on another server from the prompt
and its tokens so far. The noise of sampling depends on the position only, so it ends as it would have on the first
server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from dovetail.coordinator.fleet.fleet import Fleet, Instance
from dovetail.coordinator.generation.dispatch import excess, place
from dovetail.coordinator.generation.in_flight import (
    Generated,
    GenerationError,
    GenerationSettings,
    InFlight,
    Work,
    mean_step,
    reason_to_give_up,
    reason_to_leave,
    request_id,
)
from dovetail.coordinator.generation.kv_migration import KVMigration
from dovetail.coordinator.generation.migration_costs import Mechanism
from dovetail.coordinator.generation.migrations import Leave, Migration, StopStrings
from dovetail.coordinator.generation.requests import RequestRefused, Requests, ServerFailure, body, cancel, stream
from dovetail.coordinator.store.samples import Assignment, Key, Sample, State
from dovetail.coordinator.store.store import Store, StoreError
from dovetail.manifest.types import Generation

KIND = "rollout"
GATHER_SECONDS = 0.005
# The most requests that are started at once. Thousands would block the event loop until connections time out.
BURST = 256
TOKEN_BYTES = 4


# Given the unfinished samples, each with its instance (None: it waits for one), and the instances that may take work:
# those that what is left shall gather on, once it is time; None or nothing until then.
Tail = Callable[[Sequence[tuple[Key, str | None]], Collection[str]], Collection[str] | None]


class Generator:
    """Only one `generate` may run at a time. `drain` may be called meanwhile.

    `token`: the job's token. `clock`: monotonic seconds. `decode` gives the text of tokens, with special tokens; it is
    needed if the job has stop strings. `replay`: servers shall say which experts each token got. Use it
    with `async with`, or close it."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        generation: Generation,
        token: str,
        log: Callable[..., None],
        settings: GenerationSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        decode: Callable[[Sequence[int]], str] | None = None,
        replay: bool = False,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._replay = replay
        self._generation = generation
        self._log = log
        self._settings = settings or GenerationSettings()
        self._clock = clock
        self.kv = KVMigration(clock)
        self._requests = Requests(token, self._settings, log)
        self._migrations: list[Migration] = []
        self._wake = asyncio.Event()
        self._pending: list[Work] = []
        self._flying = InFlight(store, fleet, log, clock, self._settings.max_fruitless)
        self._watched = 0.0
        self._known: set[tuple[str, str]] = set()
        self._destinations: frozenset[str] = frozenset()
        self._stop_strings = StopStrings(generation.stop, decode)
        self._step: float | None = None  # seconds of a decode step, in the call before
        self._leftovers: dict[tuple[str, str], list[str]] = {}
        for sample in store.take_interrupted():
            owner = (sample.instance or "", sample.incarnation or "")
            self._leftovers.setdefault(owner, []).append(request_id(sample.key, sample.attempt))

    async def __aenter__(self) -> Generator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Idempotent."""
        await self._requests.close()

    # ------------------------------------------------------------ public

    async def generate(
        self,
        iteration: int,
        samples: Sequence[Sample] | None = None,
        on_finished: Callable[[Sample], None] | None = None,
        progress: Callable[[int, int, int], None] | None = None,
        tail: Tail | None = None,
    ) -> Generated:
        """Returns when every given sample (default: all pending ones of the iteration) is generated and stored.

        `on_finished` gets each sample when it is stored as generated. It does not get samples that were generated
        before this call, or that are stored while the call is cancelled or fails; ask the store for these.
        `progress(done, total, tokens)` is called after each flush. When `tail` names instances, all remaining samples
        migrate to these, as long as one of them lives. When the call is cancelled, the requests end and the tokens
        stay. Raises GenerationError or StoreError."""
        if self._flying or self._pending:
            raise RuntimeError("generate is already running")
        chosen = self._store.samples.samples(iteration, State.PENDING) if samples is None else samples
        self._pending = [Work.of(s) for s in chosen if s.state is State.PENDING]
        self._known.clear()
        self._flying.activity.clear()
        self._destinations = frozenset()
        self._migrations = []
        total, result, started = len(self._pending), Generated(), self._clock()
        result.tail.append((time.time(), total))
        self._fleet.listeners.append(self._wake.set)
        try:
            await self._loop(iteration, total, result, on_finished, progress, tail)
        finally:
            self._fleet.listeners.remove(self._wake.set)
            await self._stop()
        result.seconds = self._clock() - started
        self._step = mean_step(self._flying.activity.values()) or self._step
        result.migrations, result.instances = self._migrations, dict(self._flying.activity)
        result.spans = [a.span(name, iteration) for name, a in sorted(self._flying.activity.items())]
        return result

    def idle(self, name: str) -> bool:
        """Whether an instance has nothing to generate, and gets nothing more unless other instances fail."""
        return not self._pending and self._flying.idle(name)

    async def drain(self, name: str) -> None:
        """Give an instance no more work, and move its samples to other instances with their tokens. Returns when it has
        none left. `fleet.drain(name, False)` ends the draining."""
        self._fleet.drain(name)
        works = self._flying.on(name)
        self._end(works, "drain")
        tasks = [w.task for w in works if w.task is not None]
        if tasks:
            # `generate` cancels requests that ignore the abort.
            await asyncio.wait(tasks, timeout=2 * self._settings.abort)

    # ------------------------------------------------------------ the loop

    async def _loop(
        self,
        iteration: int,
        total: int,
        result: Generated,
        on_finished: Callable[[Sample], None] | None,
        progress: Callable[[int, int, int], None] | None,
        tail: Tail | None,
    ) -> None:
        idle_since: float | None = None
        flushed = self._clock()
        while self._pending or self._flying:
            eligible = self._eligible()
            self._greet(eligible)
            self._assign(eligible)
            self._watch()
            now = self._clock()
            if self._flying or eligible:
                idle_since = None
            elif idle_since is None:
                idle_since = now
            elif now - idle_since > self._settings.wait:
                raise GenerationError(
                    f"no rollout could take the {len(self._pending)} remaining samples of iteration {iteration} within "
                    f"{self._settings.wait:.0f} s: {self._fleet.describe(KIND)}"
                )
            # Not wait_for: on Python 3.11 it swallows a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.flush):
                    await self._wake.wait()
            # Responses often end together, at the same step of a server.
            await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()
            done = self._flying.flush(self._clock() - flushed)
            flushed = self._clock()
            unfinished = self._flying.sort_out()
            if unfinished:
                self._pending = sorted([*self._pending, *unfinished], key=lambda w: w.key)
                result.retries += len(unfinished)
            self._gather(tail)
            for key in done:
                result.samples += 1
                if on_finished is not None:
                    on_finished(self._store.samples.get(key))
            if done:
                result.tail.append((time.time(), len(self._pending) + len(self._flying)))
            result.tokens = sum(a.tokens for a in self._flying.activity.values())
            if progress is not None:
                progress(result.samples, total, result.tokens)

    def _eligible(self) -> list[Instance]:
        """The instances that may get work. After the tail was gathered these are its destinations, unless all of them
        are gone."""
        everyone = self._fleet.eligible(KIND)
        return [i for i in everyone if i.name in self._destinations] or everyone

    def _gather(self, tail: Tail | None) -> None:
        """Ask `tail` where to gather. When it names destinations, move the samples of all other instances there."""
        if tail is None or self._destinations or not (self._pending or self._flying):
            return
        unfinished = [*((w.key, None) for w in self._pending), *((w.key, w.instance) for w in self._flying)]
        chosen = tail(sorted(unfinished, key=lambda u: u[0]), [i.name for i in self._fleet.eligible(KIND)])
        if chosen:
            self._destinations = frozenset(chosen)
            moving = [w for w in self._flying if w.instance not in self._destinations]
            sources = sorted({w.instance for w in moving})
            self._log("tail.gathered", left=len(unfinished), destinations=sorted(self._destinations), sources=sources)
            self._end(moving, "tail")

    def _greet(self, eligible: Sequence[Instance]) -> None:
        """On the first sight of an instance, abort requests that an earlier coordinator left there, and give it a share
        of the work."""
        new = [i for i in eligible if (i.name, i.incarnation) not in self._known]
        first = not self._known
        for instance in new:
            self._known.add((instance.name, instance.incarnation))
            leftovers = self._leftovers.pop((instance.name, instance.incarnation), None)
            if leftovers:
                self._requests.abort(instance, leftovers)
        if new and not first and not self._pending:
            loads = self._flying.loads(eligible)
            idle = [i.name for i in new if loads[i.name] == 0]
            for name, count in excess(loads, idle, self._generation.max_concurrent).items():
                works = [w for w in self._flying.on(name) if w.ending is None]
                # The samples with the fewest tokens, which have most to come.
                self._end(sorted(works, key=lambda w: len(w.tokens))[:count], "newcomer")

    def _assign(self, eligible: Sequence[Instance]) -> None:
        if not eligible:
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
            keep = self._stop_strings.kept(work.prompt, work.tokens)
            del work.tokens[keep:], work.logprobs[keep:]
            work.stored = work.before = len(work.tokens)
            work.instance, work.incarnation = name, instance.incarnation
            work.ending = work.reason = work.failure = work.refusal = None
            assignments.append(Assignment(work.key, name, instance.incarnation, instance.weight_version, work.stored))
        attempts = self._store.samples.assign(assignments)
        now, wall = self._clock(), time.time()
        interval = self._settings.interval(len(works) + len(self._pending) + len(self._flying), self._step)
        for work, attempt in zip(works, attempts, strict=True):
            work.attempt, work.interval = attempt, interval
            self._flying.begin(work, now, wall)
            work.task = asyncio.create_task(self._run(work, by_name[work.instance]))

    async def _run(self, work: Work, instance: Instance) -> None:
        def on_tokens(tokens: list[int], logprobs: list[float], reason: str | None, experts: bytes | None) -> None:
            now = self._clock()
            if work.first and tokens:
                sent = self.kv.nbytes
                self._started(work, instance, now, arrived(), self.kv.nbytes - sent)
            else:
                work.steps, work.spent = work.steps + len(tokens), work.spent + now - work.last_token
            work.tokens += tokens
            work.logprobs += logprobs
            work.last_token, work.reason, work.experts = now, reason, experts

        departure, work.departure = work.departure, None
        try:
            room = int(instance.abilities.get("max_model_len") or 2**31) - len(work.prompt) - len(work.tokens)
            left = min(self._generation.max_tokens - len(work.tokens), room)
            if left < 1:
                # The end was reached, but the coordinator died before it was stored; or the context is full.
                work.reason = "length"
                return
            session, request = self._requests.session, self._body(work, instance, left)
            arrived = await self.kv.prepare(session, request, instance, departure, bool(work.tokens))
            await stream(session, instance.url, request, on_tokens)
            if work.reason == "abort" and len(work.tokens) > work.before:
                work.departure = self.kv.left(instance, work.request_id)
        except ServerFailure as error:
            work.failure = str(error)
        except RequestRefused as error:
            work.refusal = str(error)
        finally:
            self._flying.ended(work)
            self._wake.set()

    def _body(self, work: Work, instance: Instance, left: int) -> dict[str, Any]:
        return body(work, self._generation, instance, left, work.interval, self._replay)

    def _started(
        self, work: Work, instance: Instance, now: float, moved: tuple[Mechanism, float] | None, nbytes: int
    ) -> None:
        """Record the time to a request's first token: of a prefill or a migration. `nbytes`: bytes of KV cache that
        were moved."""
        work.first = False
        tokens = len(work.prompt) + len(work.tokens)
        mechanism = Mechanism.TOKENS if moved is None else moved[0]
        if mechanism is Mechanism.TOKENS:
            nbytes = TOKEN_BYTES * tokens
            self._flying.activity[instance.name].prefilled(work.begun, tokens, now - work.begun)
        if work.leave is not None:
            leave, work.leave = work.leave, None
            names = leave.instance, instance.name, mechanism.value, leave.reason
            migration = Migration(work.key, *names, tokens, nbytes, now - leave.time, time.time())
            self._migrations.append(migration)
            self._log("sample.moved", **migration.fields())

    def _watch(self) -> None:
        """End requests that stall, whose process is gone, or that ignored an abort. Move samples away from servers that
        will end soon or seem to be dead."""
        now, s = self._clock(), self._settings
        if now - self._watched < s.flush:
            return
        self._watched = now
        fleet = {i.name: i for i in self._fleet.instances(KIND)}
        eligible = {i.name for i in self._eligible()}
        last_tokens: dict[str, float] = {}
        for work in self._flying:
            last_tokens[work.instance] = max(last_tokens.get(work.instance, 0.0), work.last_token)
        for name in last_tokens:
            quiet, others = now - last_tokens[name], bool(eligible - {name})
            if (reason := reason_to_leave(fleet.get(name), quiet, others, s)) is not None:
                self._end(self._flying.on(name), reason)
        for work in self._flying:
            if work.task is None or work.task.done():
                continue
            failure = reason_to_give_up(work, fleet.get(work.instance), now, last_tokens[work.instance], s)
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
            by_instance.setdefault(work.instance, []).append(work.request_id)
        for name, ids in by_instance.items():
            instance = self._fleet.get(name)
            if instance is not None:
                self._requests.abort(instance, ids)

    async def _stop(self) -> None:
        """End all running requests. Their tokens are stored, and their samples are pending again."""
        flying = list(self._flying)
        await cancel([w.task for w in flying if w.task is not None])
        try:
            if flying:
                self._flying.flush(0.0)
                self._store.samples.release([(w.key, w.attempt) for w in self._flying])
        except StoreError as error:
            self._log("generation.unsaved", error=str(error))
        self._flying.clear()
        self._pending.clear()
