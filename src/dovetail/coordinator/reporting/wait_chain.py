"""Says in one sentence who waits for whom, since when, down to the cause, and what to do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

STALLED = "Stalled"
# Every process reports each two seconds or more often. One that has not for so many seconds is stopped, dead, or on a
# machine that has no time for it.
SILENT_SECONDS = 10.0
# A phase is late if it takes this many times its usual seconds, and never before so many seconds.
LATE_FACTOR = 3.0
LATE_SECONDS = 30.0
REMEMBERED = 20
MOST_PLACES = 3


@dataclass(frozen=True)
class Peer:
    """A process. It was last `heard` of then. `reason` says why it may not work, and is empty if it may. `samples` are
    on it, and its last `token` came then. A trainer that makes no progress is `at` this line of the code, and `waits`
    in this collective, if any. Times are in seconds since the epoch."""

    name: str
    heard: float
    reason: str = ""
    samples: int = 0
    token: float = 0.0
    at: str = ""
    waits: str = ""


@dataclass(frozen=True)
class WaitingRun:
    """What the coordinator knows of a run that is in a phase of an iteration. `calls` says since when each reward
    function that runs has been running, in seconds since the epoch."""

    phase: str
    trainers: Sequence[Peer]
    servers: Sequence[Peer]
    scorers: Sequence[Peer]
    calls: Mapping[str, float]


def wait_chain(found: WaitingRun, since: float, now: float) -> str:
    """The sentence about a run that has been in its phase since then. Like all verdicts it names no iteration. It
    has no durations, so it stays the same as long as nothing happens. Times are in seconds since the epoch."""
    told = f"{found.phase} has gone on since {_clock(since)}"
    return f"{told}: {_Cause(found, now - SILENT_SECONDS).sentence()}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


@dataclass(frozen=True)
class _Cause:
    """The most likely cause. It is looked for where the phase waits, and then where that waits. Who was last heard of
    before `limit` is silent."""

    found: WaitingRun
    limit: float

    def sentence(self) -> str:
        found = self.found
        if found.phase == "training":
            return self._of_trainers()
        if found.phase == "weights":
            if silent := self._silent(found.trainers) or self._silent([*found.servers, *found.scorers]):
                return f"it waits for weights; {_silence(silent)}"
            return self._of_trainers() if any(peer.reason or peer.at for peer in found.trainers) else self._of_weights()
        return self._of_samples()

    def _of_trainers(self) -> str:
        if (silent := self._silent(self.found.trainers)) is not None:
            return f"it waits for the trainers; {_silence(silent)}"
        absent = [peer.name for peer in self.found.trainers if peer.reason]
        if absent:
            return f"it waits for {', '.join(absent)} to join the other trainers; the log of {absent[0]} says why not"
        places: dict[tuple[str, str], list[str]] = {}
        for peer in self.found.trainers:
            if peer.at:
                places.setdefault((peer.waits, peer.at), []).append(peer.name)
        if not places:
            return "all trainers report and make progress"
        # The others wait for the one that is in no collective, or in one of its own.
        found = sorted(places.items(), key=lambda place: (bool(place[0][0]), len(place[1])))
        told = ", ".join(
            f"{_some(names)} at {place}{f', in {waits}' if waits else ''}"
            for (waits, place), names in found[:MOST_PLACES]
        )
        return f"all trainers report, but some make no progress: {told}; the first is the likeliest cause"

    def _of_samples(self) -> str:
        found = self.found
        holding = [peer for peer in found.servers if peer.samples]
        if (silent := self._silent(holding)) is not None:
            return f"it waits for {silent.samples} samples on {silent.name}; {_silence(silent)}"
        quiet = min(holding, key=lambda peer: peer.token, default=None)
        if quiet is not None and quiet.token < self.limit:
            return (
                f"it waits for {quiet.samples} samples on {quiet.name}, which reports, but has drawn no token since "
                f"{_clock(quiet.token)}; its log says why"
            )
        if holding:
            return f"it waits for {sum(peer.samples for peer in holding)} samples, and all servers draw tokens"
        if found.calls:
            name, began = min(found.calls.items(), key=lambda call: call[1])
            if began < self.limit:
                return (
                    f"it waits for the reward function {name}, which has been running since {_clock(began)}; "
                    "spec.models.reward.timeoutSeconds ends it, and the log then has its frames"
                )
        if (silent := self._silent(found.scorers)) is not None:
            return f"it waits for scores; {_silence(silent)}"
        return self._of_weights()

    def _of_weights(self) -> str:
        """If no server has samples."""
        found = self.found
        if (silent := self._silent(found.servers)) is not None:
            return f"it waits for a server; {_silence(silent)}"
        barred = next((peer for peer in found.servers if peer.reason), None)
        if barred is None:
            return "all processes report, and none is late"
        told = f"it waits for {barred.name}, which may not draw: {barred.reason}"
        silent = self._silent(found.trainers)
        return told if silent is None else f"{told}; the trainers send weights, and {_silence(silent)}"

    def _silent(self, peers: Sequence[Peer]) -> Peer | None:
        """The one that has been silent for the longest time."""
        return min((peer for peer in peers if peer.heard < self.limit), key=lambda peer: peer.heard, default=None)


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _silence(peer: Peer) -> str:
    return (
        f"{peer.name} has not reported since {_clock(peer.heard)}: it hangs, is stopped, or is being started again, "
        "which happens by itself (failurePolicy.peerTimeoutSeconds); its log says what it did last"
    )


class PhaseClock:
    """Knows how long the phases of a run usually take. `see` is called about once a second."""

    def __init__(self) -> None:
        self._usual: dict[str, deque[float]] = {}
        self._now: tuple[str, int] | None = None
        self._since = 0.0

    def see(self, phase: str | None, iteration: int, now: float) -> float | None:
        """Since when the phase has lasted if it is late, else None. Both are in monotonic seconds."""
        place = None if phase is None else (phase, iteration)
        if place != self._now:
            if self._now is not None:
                self._usual.setdefault(self._now[0], deque(maxlen=REMEMBERED)).append(now - self._since)
            self._now, self._since = place, now
        if place is None:
            return None
        before = self._usual.get(place[0])
        late = max(LATE_SECONDS, LATE_FACTOR * median(before) if before else 0.0)
        return self._since if now - self._since > late else None
