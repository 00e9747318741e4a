"""What a generator knows of its samples and instances while it runs, and its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from dovetail.coordinator.generation.kv_migration import Departure
from dovetail.coordinator.generation.migrations import Leave, Migration
from dovetail.coordinator.store.samples import Key, Sample
from dovetail.protocol.messages import Span

# An event costs the coordinator some 30 microseconds of CPU, and the server more, be it of one token or of eight. With
# so many samples for each token in an event, at 50 tokens a second, the coordinator spends at most a tenth of a core.
SAMPLES_PER_TOKEN = 64
MOST_PER_EVENT = 64
# Small models decode so fast that their tokens share events worth this much: what a death then costs nobody notices.
EVENT_SECONDS = 0.1


@dataclass(frozen=True)
class GenerationSettings:
    """Seconds, but `stream_interval`: tokens per event (None: by the number of samples, see `interval`), and
    `max_fruitless`: attempts of one sample in a row without a token.

    `stall`: silence after which a request is given up, if its whole server is silent; ten times it otherwise (a server
    may queue requests while it works on others). `suspect`: silence after which the samples of a suspect server go
    elsewhere."""

    flush: float = 0.25
    stall: float = 60.0
    suspect: float = 10.0
    wait: float = 600.0
    connect: float = 15.0
    abort: float = 5.0
    stream_interval: int | None = None
    max_fruitless: int = 50

    def interval(self, samples: int, step: float | None = None) -> int:
        """Tokens per event while so many samples are left and a decode step takes `step` seconds, if known: 1, so that
        a server that dies costs nothing, unless steps are short or one core could not follow; what is lost is generated
        again identically."""
        if self.stream_interval is not None:
            return self.stream_interval
        short = 1 if not step else int(EVENT_SECONDS / step)
        return min(MOST_PER_EVENT, max(1, -(-samples // SAMPLES_PER_TOKEN), short))


@dataclass
class Activity:
    """An instance's part in one call: wall-clock span and counts.

    `decode`: by batch size, steps of single requests and the seconds they took. `prefills`: by the time of submission,
    tokens and seconds to the last first token."""

    start: float
    end: float
    samples: int = 0
    tokens: int = 0
    fresh: int = 0
    decode: dict[int, tuple[int, float]] = field(default_factory=dict)
    prefills: dict[float, tuple[int, float]] = field(default_factory=dict)

    def span(self, name: str, iteration: int) -> Span:
        """Its bar on the timeline."""
        args = {"samples": self.samples, "tokens": self.tokens}
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
    """What one call did. `retries`: times a sample had to leave a server; `migrations`: those that went on elsewhere.
    `tail`: (seconds since the epoch, samples left). Spans: one per instance that worked."""

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
    """One sample on its way. `stored`: how many of `tokens` are in the store; `before`: how many it had when its
    current attempt began. `heard`, `ending`: when its last token came and when it was asked to end, monotonic seconds.
    `reason`: the server's finish reason. `failure`, `refusal`: why its stream broke. `fruitless`: attempts in a row
    without a token. `departure`: where its keys and values may still be. `interval`: tokens per event."""

    key: Key
    prompt: list[int]
    seed: int
    tokens: list[int]
    logprobs: list[float]
    stored: int
    attempt: int = 0
    instance: str = ""
    incarnation: str = ""
    task: asyncio.Task[None] | None = None
    before: int = 0
    heard: float = 0.0
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

    @staticmethod
    def of(sample: Sample) -> Work:
        """A pending sample with the tokens it has."""
        tokens: list[int] = sample.tokens.tolist()
        logprobs: list[float] = sample.logprobs.tolist()
        return Work(sample.key, sample.prompt_tokens.tolist(), sample.seed, tokens, logprobs, len(tokens))

    @property
    def request_id(self) -> str:
        return request_id(self.key, self.attempt)

    @property
    def name(self) -> str:
        return f"sample {self.key.sample} of prompt {self.key.prompt} in iteration {self.key.iteration}"


def request_id(key: Key, attempt: int) -> str:
    """Unique per attempt, so that an old request can be aborted without touching its successor."""
    return f"dovetail-{key.iteration}-{key.prompt}-{key.sample}-{attempt}"


def mean_step(activities: Iterable[Activity]) -> float | None:
    """Seconds of a request's decode step on average; None where none was seen."""
    seen = [found for activity in activities for found in activity.decode.values()]
    steps = sum(count for count, _ in seen)
    return sum(seconds for _, seconds in seen) / steps if steps else None
