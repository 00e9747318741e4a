"""Simulates scorers, event by event, while samples come."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from dovetail.fusion.profile import MIN_BATCH_TOKENS, batch_target

D = TypeVar("D", bound=Hashable)  # a device
Together = list[tuple[int, int]]
"""Samples that are scored together: the tokens of each, and its number. The longest comes first."""
Coming = Sequence[tuple[float, int, int]]
"""Parts of samples in the order of time: when the part is generated, its tokens, and the sample's number."""


@dataclass(frozen=True)
class SimulatedScorer(Generic[D]):
    """A process that scores. `queue`: the models that it holds. Scorers of equal models share the samples, and each
    sample goes through every queue. `devices`: all that it needs for a pass, one scorer at a time. `seconds`: the time
    of a batch on the devices, and the time until its scores are there. `begin`: when it may begin. `least`: the fewest
    tokens of a batch, if as many wait (`batch_target`). `rows`: the most samples of a batch, whatever their tokens.
    None: the coordinator's batches, which are limited by tokens."""

    queue: Hashable
    devices: Sequence[D]
    seconds: Callable[[Together], tuple[float, float]]
    begin: float = 0.0
    least: int = MIN_BATCH_TOKENS
    rows: int | None = None


class ScoringPass(NamedTuple):
    """A batch of the scorer with this number. Its devices work for `seconds` from `start` on, and `scored` is when its
    scores are there."""

    scorer: int
    start: float
    seconds: float
    scored: float

    @property
    def end(self) -> float:
        """When the devices are free again."""
        return self.start + self.seconds


Idle = tuple[float, int]
"""Since when a scorer waits for samples, and its number. Of those that wait, the lowest takes the next batch."""


class _Queue:
    """The samples that the scorers of one queue share, and the scorers that wait for them. `first`: the one that takes
    the next batch."""

    def __init__(self, coming: Coming, scorers: int) -> None:
        self._coming, self._next, self._scorers = coming, 0, scorers
        self._ready: list[tuple[int, int]] = []  # a heap of (-tokens, sample)
        self._waiting = 0
        self.first: Idle | None = None
        self._behind: list[Idle] = []  # a heap

    def wait(self, scorer: Idle) -> bool:
        """Lets an idle scorer wait. Returns whether it is the first."""
        if self.first is not None and self.first < scorer:
            heapq.heappush(self._behind, scorer)
            return False
        self.first = scorer
        return True

    def follow(self) -> Idle | None:
        """The next scorer that waits, once the first is gone. It is the first now."""
        self.first = heapq.heappop(self._behind) if self._behind else None
        return self.first

    def next(self) -> float:
        """When there is something to score. It is infinite if nothing is left, and 0 if something waits."""
        if self._ready:
            return 0.0
        return self._coming[self._next][0] if self._next < len(self._coming) else float("inf")

    def take(self, scorer: SimulatedScorer[Any], now: float) -> Together:
        """The next batch, the longest samples first. A batch is padded to its longest sample."""
        while self._next < len(self._coming) and self._coming[self._next][0] <= now:
            _, tokens, sample = self._coming[self._next]
            heapq.heappush(self._ready, (-tokens, sample))
            self._waiting += tokens
            self._next += 1
        longest, most = -self._ready[0][0], scorer.rows
        if most is None:
            most = max(1, batch_target(self._waiting, self._scorers, scorer.least) // longest)
        taken = [heapq.heappop(self._ready) for _ in range(min(most, len(self._ready)))]
        self._waiting += sum(less for less, _ in taken)
        return [(-less, sample) for less, sample in taken]


def score(scorers: Sequence[SimulatedScorer[D]], coming: Coming, free: Mapping[D, float]) -> list[ScoringPass]:
    """All passes until every part is scored by a scorer of every queue. A scorer takes a batch when its devices are
    free and a part waits. `free`: when each device is free for the first time."""
    queues = {name: _Queue(coming, count) for name, count in Counter(s.queue for s in scorers).items()}
    free, passes = dict(free), list[ScoringPass]()
    users = Counter(device for scorer in scorers for device in scorer.devices)
    heap = [(0.0, 0.0, i) for i in range(len(scorers))]
    while heap:
        due, since, i = heapq.heappop(heap)
        scorer, queue = scorers[i], queues[scorers[i].queue]
        first = queue.first == (since, i)
        if first:
            queue.first = None
        since = max(since, scorer.begin, *(free[device] for device in scorer.devices))
        ready = max(since, queue.next())
        if ready == float("inf"):
            continue
        if ready > due:
            # While a scorer waits, others may use the devices that it shares. So it needs an event of its own.
            shares = any(users[device] > 1 for device in scorer.devices)
            if ready == since or shares or queue.wait((since, i)):
                heapq.heappush(heap, (ready, since, i))
            continue
        busy, until = scorer.seconds(queue.take(scorer, due))
        passes.append(ScoringPass(i, due, busy, due + until))
        free.update(dict.fromkeys(scorer.devices, due + busy))
        heapq.heappush(heap, (due + busy, due + busy, i))
        if first and (following := queue.follow()):
            heapq.heappush(heap, (due, *following))
    return passes
