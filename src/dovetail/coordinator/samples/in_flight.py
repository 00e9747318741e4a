"""Follows the samples that servers are generating. It keeps the state of each, decides when a request is given up, and
stores new tokens."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dovetail.coordinator.samples.dispatch import Speeds
from dovetail.coordinator.samples.migrations import Departure, Leave, Migration
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.experts import first_wanted, tokens_of
from dovetail.coordinator.store.samples import Delta, Key, Sample
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, Instance, InstanceHealth
from dovetail.protocol.messages import Span

# An event is what vLLM hands over of one sample. It costs its server about 30 microseconds of CPU time, with one token
# or eight. So an event has one token for each SAMPLES_PER_TOKEN samples that are left.
SAMPLES_PER_TOKEN = 64
MOST_PER_EVENT = 64
# Small models decode fast. Their tokens share events that cover this time. It costs little to lose them.
EVENT_SECONDS = 0.1
# A server gathers events in frames. Each sample in a frame costs the coordinator about 20 microseconds, so frames come
# the less often, the more samples are drawn.
FRAME_SECONDS_PER_SAMPLE = 5e-4
MOST_FRAME_SECONDS = 2.0


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of generation. Times are in seconds. `stream_interval` is the number of tokens per event. If it is None,
    `interval` and `frame` decide. Generation fails after `max_fruitless` attempts of a sample in a row without a token.

    A request is given up after a silence of `stall` if its whole server is silent. If only the request is silent, it is
    given up after ten times this time, because a server may queue requests. After a silence of `suspect` the samples of
    a suspect server move to other servers."""

    flush: float = 0.25
    stall: float = 60.0
    suspect: float = 10.0
    wait: float = 600.0
    connect: float = 15.0
    abort: float = 5.0
    stream_interval: int | None = None
    max_fruitless: int = 50

    def interval(self, samples: int, step: float | None = None) -> int:
        """The tokens per event when `samples` samples are left. `step` is the seconds of a decode step, if known. The
        result is usually 1, so that no token is lost when a server dies. It is larger if decode steps are short, or if
        one core could not handle the events. Lost tokens are generated again with the same result."""
        if self.stream_interval is not None:
            return self.stream_interval
        short = 1 if not step else int(EVENT_SECONDS / step)
        return min(MOST_PER_EVENT, max(1, -(-samples // SAMPLES_PER_TOKEN), short))

    def frame(self, samples: int) -> float:
        """The seconds between two frames of a server when `samples` samples are drawn on all servers. It is 0 with a
        `stream_interval`."""
        return 0.0 if self.stream_interval else min(MOST_FRAME_SECONDS, samples * FRAME_SECONDS_PER_SAMPLE)


@dataclass
class Activity:
    """The work of one instance in one call of `generate`.

    `decode` has for each batch size the number of decode steps of single requests and their seconds. `prefills` has for
    each time of submission the number of tokens, and the seconds until the last request had its first token. `again`
    counts the tokens that were computed a second time, because a sample went on without its KV cache."""

    start: float
    end: float
    samples: int = 0
    tokens: int = 0
    fresh: int = 0
    again: int = 0
    decode: dict[int, tuple[int, float]] = field(default_factory=dict)
    prefills: dict[float, tuple[int, float]] = field(default_factory=dict)

    def span(self, name: str, iteration: int, version: int) -> Span:
        """The span on the timeline. `version` is the version of the weights."""
        args = {"samples": self.samples, "tokens": self.tokens, "weights": version}
        args |= {"prefilled_again": self.again} if self.again else {}
        return Span(name="generation", process=name, start=self.start, end=self.end, iteration=iteration, args=args)

    def decoded(self, batch: int, steps: int, seconds: float) -> None:
        if steps:
            before = self.decode.get(batch, (0, 0.0))
            self.decode[batch] = (before[0] + steps, before[1] + seconds)

    def prefilled(self, begun: float, tokens: int, seconds: float) -> None:
        before = self.prefills.get(begun, (0, 0.0))
        self.prefills[begun] = (before[0] + tokens, max(before[1], seconds))


@dataclass
class Generated:
    """The result of one call of `generate`. `retries` says how often an attempt at a sample failed. `migrations` has
    the samples that continued on another server. `tail` has pairs (seconds since the epoch, samples left). `spans` has
    one span for each instance that worked."""

    samples: int = 0
    tokens: int = 0
    retries: int = 0
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)
    tail: list[tuple[float, int]] = field(default_factory=list)
    instances: dict[str, Activity] = field(default_factory=dict)


@dataclass(eq=False)
class Work:
    """One sample that is being generated, with at most `limit` tokens. `stored` of its `tokens` are in the store, and
    it had `before` tokens when the current attempt began. Its last token arrived at `last_token`, and its request was
    asked to end at `ending`, in monotonic seconds. `reason` is the server's finish reason. `failure` and `refusal` say
    why its stream broke. `fruitless` counts attempts in a row without a token. `departure` says where its KV cache may
    still be. `interval` is the number of tokens per event. `experts` has the experts of the tokens from `experts_from`
    on, which are not stored yet. The experts of `reported` tokens are stored."""

    key: Key
    prompt: array[int]
    seed: int
    tokens: array[int]
    logprobs: array[float]
    stored: int
    limit: int
    attempt: int = 0
    instance: str = ""
    incarnation: str = ""
    task: asyncio.Task[None] | None = None
    before: int = 0
    last_token: float = 0.0
    ending: float | None = None
    reason: str | None = None
    failure: str | None = None
    refusal: str | None = None
    fruitless: int = 0
    leave: Leave | None = None
    begun: float = 0.0
    first: bool = True
    steps: int = 0
    spent: float = 0.0
    departure: Departure | None = None
    interval: int = 1
    experts: bytes | None = None
    reported: int = 0

    @staticmethod
    def of(sample: Sample, limit: int) -> Work:
        """A pending sample with its tokens so far."""
        prompt, tokens = (array("i", each.tobytes()) for each in (sample.prompt_tokens, sample.tokens))
        return Work(sample.key, prompt, sample.seed, tokens, array("f", sample.logprobs.tobytes()), len(tokens), limit)

    @property
    def request_id(self) -> str:
        return request_id(self.key, self.attempt)

    @property
    def experts_from(self) -> int:
        """The first token whose experts the current attempt must report."""
        return first_wanted(len(self.prompt), self.before, self.reported)

    @property
    def name(self) -> str:
        return f"sample {self.key.sample} of prompt {self.key.prompt} in iteration {self.key.iteration}"


def request_id(key: Key, attempt: int) -> str:
    """The id of one attempt's request. It is unique, so an old request can be aborted without an effect on the next
    one."""
    return f"dovetail-{key.iteration}-{key.prompt}-{key.sample}-{attempt}"


def mean_step(activities: Iterable[Activity]) -> float | None:
    """The mean seconds of a request's decode step. None if there was no step."""
    seen = [found for activity in activities for found in activity.decode.values()]
    steps = sum(count for count, _ in seen)
    return sum(seconds for _, seconds in seen) / steps if steps else None


def reason_to_give_up(
    work: Work, instance: Instance | None, now: float, server_last_token: float, settings: GenerationSettings
) -> str | None:
    """The reason to drop a request's connection, as a phrase. It is "" for a request that ignored its abort. It is None
    if the connection is kept.

    A request on the same server last got a token at `server_last_token`, in monotonic seconds."""
    if instance is None or instance.incarnation != work.incarnation or instance.health is InstanceHealth.DEAD:
        return "its process is gone"
    if work.ending is not None and now - work.ending > settings.abort:
        return ""
    limit = settings.stall if now - server_last_token > settings.stall else 10 * settings.stall
    if now - work.last_token > limit:
        return f"no token for {now - work.last_token:.0f} s"
    return None


def reason_to_leave(
    instance: Instance | None, quiet: float, elsewhere: bool, settings: GenerationSettings
) -> str | None:
    """The reason why the samples of a server that may still answer move to other servers. None if they stay. The reason
    `drain` means that its pod will end, or that the server was asked to drain. `suspect` means that it does not report,
    its requests got no token for `quiet` seconds, and there is another server (`elsewhere`)."""
    if instance is None:
        return None
    if instance.draining or instance.health is InstanceHealth.RETIRED:
        return "drain"
    if instance.health is InstanceHealth.SUSPECT and elsewhere and quiet > settings.suspect:
        return "suspect"
    return None


FINISHED = ("stop", "length", "repetition")


class GenerationError(Exception):
    """Generation cannot continue. The message says what it waits for or what a server refused."""


class InFlight:
    """The samples in flight. `activity` says what each instance did. `clock` returns monotonic seconds. `speeds` has
    the speeds of all instances, in all iterations."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        log: Callable[..., None],
        clock: Callable[[], float],
        settings: GenerationSettings,
        speeds: Speeds,
    ) -> None:
        self._store, self._fleet, self._log, self._clock = store, fleet, log, clock
        self._max_fruitless, self._speeds = settings.max_fruitless, speeds
        self._works: dict[Work, None] = {}
        # The samples on each instance that has any, and when one of them last got a token.
        self._on: dict[str, dict[Work, None]] = {}
        self._heard: dict[str, float] = {}
        # Samples with something to store.
        self._changed: dict[Work, None] = {}
        self._ended: list[Work] = []
        self.activity: dict[str, Activity] = {}

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._works)

    def __contains__(self, work: Work) -> bool:
        return work in self._works

    @property
    def late(self) -> bool:
        """Whether there is something to store."""
        return bool(self._changed)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of requests on each instance that has any."""
        return {name: len(works) for name, works in self._on.items()}

    def on(self, name: str) -> list[Work]:
        """The samples that one instance is generating."""
        return list(self._on.get(name, ()))

    def last_token(self, name: str) -> float:
        """When a request on this instance last got a token, or began, in monotonic seconds."""
        return self._heard[name]

    def loads(self, instances: Sequence[Instance]) -> dict[str, int]:
        """The number of requests on each instance."""
        return {i.name: len(self._on.get(i.name, ())) for i in instances}

    def idle(self, name: str) -> bool:
        """Whether an instance has no request."""
        return name not in self._on

    def speeds(self, names: Sequence[str]) -> dict[str, float]:
        """The relative speeds of instances."""
        return self._speeds.relative(names)

    def begin(self, work: Work, now: float, wall: float) -> None:
        """Record that an instance was given a sample. `now` is in monotonic seconds, and `wall` in seconds since the
        epoch."""
        work.last_token, work.begun, work.first = now, now, True
        self._works[work] = None
        self._on.setdefault(work.instance, {})[work] = None
        self._heard[work.instance] = now
        self.activity.setdefault(work.instance, Activity(wall, wall)).end = wall

    def changed(self, work: Work, now: float) -> None:
        """Record that a sample has new tokens. `flush` stores them."""
        self._changed[work] = None
        self._heard[work.instance] = now

    def ended(self, work: Work) -> None:
        """Record that a sample's request has ended, for any reason. `flush` and `sort_out` handle it."""
        self._changed[work] = None
        self._ended.append(work)

    def _remove(self, work: Work) -> None:
        del self._works[work]
        here = self._on[work.instance]
        del here[work]
        if not here:
            del self._on[work.instance]

    def clear(self) -> None:
        for each in (self._works, self._on, self._changed, self._ended):
            each.clear()

    def flush(self, most: int | None = None) -> list[Work]:
        """Store the new tokens of all samples, or of `most` of them. Returns the samples that are now finished.
        `late` says whether others are left for the next flush. Raises StoreError."""
        deltas: list[Delta] = []
        works: list[Work] = []
        changed = list(islice(self._changed, most))
        for work in changed:
            del self._changed[work]
        for work in changed:
            if work not in self._works:
                continue
            if work.steps:
                self.activity[work.instance].decoded(len(self._on[work.instance]), work.steps, work.spent)
                work.steps, work.spent = 0, 0.0
            reason = work.reason if work.reason in FINISHED else None
            if len(work.tokens) > work.stored or reason is not None or work.experts is not None:
                tokens, logprobs = work.tokens[work.stored :], work.logprobs[work.stored :]
                experts = None if work.experts is None else (work.experts_from, work.experts)
                deltas.append(Delta(work.key, work.attempt, work.stored, tokens, logprobs, reason, experts))
                works.append(work)
        if deltas and not all(self._store.samples.record(deltas)):
            raise StoreError("the store refused tokens of a current request; is a second coordinator at work?")
        done, wall = [], time.time()
        for work, delta in zip(works, deltas, strict=True):
            activity, new = self.activity[work.instance], len(delta.tokens)
            activity.end = wall
            activity.tokens, activity.fresh = activity.tokens + new, activity.fresh + new
            work.stored, work.experts = len(work.tokens), None
            if delta.experts is not None:
                work.reported = max(work.reported, delta.experts[0] + tokens_of(delta.experts[1]))
            if delta.finish_reason is not None:
                done.append(work)
                activity.samples += 1
                self._remove(work)
                self._fleet.succeeded(work.instance)
        return done

    def measure(self, streams: Mapping[str, int], seconds: float) -> None:
        """Record the speed of each instance, from the tokens that were stored in the last `seconds` and its number of
        requests meanwhile."""
        for name, n in streams.items():
            self._speeds.measured(name, self.activity[name].fresh, n, seconds)
            self.activity[name].fresh = 0

    def sort_out(self) -> list[Work]:
        """Call it after a flush. Samples whose request ended before they were finished, and whose tokens are stored,
        become pending again and are returned. Raises GenerationError if a server refused a sample, or if a sample never
        gets a token."""
        ended = [w for w in self._ended if w in self._works]
        self._ended = [w for w in ended if w in self._changed]  # left for the next flush
        unfinished = [w for w in ended if w not in self._changed]
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
