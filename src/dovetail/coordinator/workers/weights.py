"""Keeps every rollout and scorer on the current weights. All instances get them after each step. Late instances get
them in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from dovetail.coordinator.job import Job
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT, weights_name
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.preparing import Preparing
from dovetail.coordinator.workers.publishing import Published, Publisher, Target
from dovetail.coordinator.workers.ranks import Ranks
from dovetail.coordinator.workers.relays import Relays
from dovetail.coordinator.workers.trainer_group import TrainerLost

RETRY_SECONDS = 0.25
# A transfer waits this many seconds for instances that must first load models or wake up. Later ones get a transfer of
# their own.
PREPARE_SECONDS = 10.0
# Running instances must take weights within this many seconds.
WEIGHTS_SECONDS = 300.0
# A scorer may load its models for this many seconds before the time limit for weights begins to run.
LOADING_SECONDS = 900.0
# After a failed transfer to an unreliable instance alone, the pause is PAUSE times as long as the attempt. It doubles
# after each further failure, because the trainers can do nothing else during an attempt.
PAUSE, LONGEST_PAUSE_SECONDS = 4.0, 600.0


@dataclass(frozen=True)
class _Doubt:
    """A process whose transfer failed. `failures` says how often an attempt for it alone failed. `until` is the
    earliest time of the next attempt, in monotonic seconds."""

    incarnation: str
    failures: int
    until: float


class Reaching(Protocol):
    """The parts of an open iteration that are used here."""

    version: int

    @property
    def first(self) -> bool: ...
    def missing(self) -> Sequence[str]: ...


class Preparation(Protocol):
    """The part of `Devices` that is used here."""

    async def prepare(self, target: Target) -> None:
        """Make an instance ready for weights, because a scorer must first load its models. It may raise OSError."""


class Weights:
    """Sends weights to all instances that lack them. Running instances must get their weights within
    `deadline_seconds`, in addition to the time for their bytes. The first instance of a kind must start within
    `job.start_seconds`.

    A transfer goes to all instances that lack the version at once. An instance that cannot be reached would block all
    others each time. Therefore an instance whose transfer failed gets its weights alone, after the others. For the same
    reason a transfer does not wait for an instance that takes long to prepare.

    While the trainers do not hold the version, or while they send to others, a rollout gets it from a rollout that
    serves it (`Relays`), if there is one."""

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        publisher: Publisher,
        ranks: Ranks,
        devices: Preparation,
        deadline_seconds: float = WEIGHTS_SECONDS,
    ) -> None:
        self._fleet, self._publisher, self._ranks = fleet, publisher, ranks
        self._timeline, self._log, self._clock = job.records.timeline, job.log, job.clock
        self._deadline, self._start = deadline_seconds, job.start_seconds
        self._preparing = Preparing(devices.prepare)
        self._doubts: dict[str, _Doubt] = {}
        self._relays = Relays(fleet, publisher, devices.prepare, job.log, job.clock)
        self._sending: frozenset[str] = frozenset()  # the instances of the trainers' transfer
        self._lock = asyncio.Lock()
        # The total seconds in which bytes travelled, or in which the trainers had to be brought to the version.
        self._excused = 0.0
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version that instances must hold to take work. None before PPO."""
        return self._version

    def begin(self, version: int) -> None:
        """Make `version` the current one, which draws the oldest open iteration. `hold` sends it to all instances for
        which the fleet names no other version."""
        self._version = version
        self._relays.forget_failures(version)
        if version != BEFORE_SFT:
            self._ranks.need(version)

    async def publish(self, version: int) -> None:
        """Make `version` the current one of all instances. Returns when at least one instance of each kind holds it.
        The trainers must hold the model before SFT if that is the version. Scorers do not get it. Raises what `reach`
        raises."""
        self._fleet.want({})
        self.begin(version)
        await self._until(version, lambda: [kind for kind in self._takers if not self._fleet.has_current(kind)])

    async def reach(self, turn: Reaching) -> None:
        """Returns when a server that may draw the iteration holds its weights.

        While no instance of a kind is running, the time counts against `start_seconds`, because its pod may wait for a
        node or an image. The time in which bytes travel or the trainers are restored does not count. Time in which the
        iteration is not the oldest open one does not count either. Raises TimeoutError that names what is missing."""
        if turn.missing():
            await self._until(turn.version, turn.missing, lambda: turn.first)

    @property
    def _takers(self) -> list[str]:
        """The kinds of instances that take the current version."""
        return ["rollout"] if self._version == BEFORE_SFT else sorted(self._fleet.versioned)

    async def _until(
        self, version: int, missing_kinds: Callable[[], Sequence[str]], counts: Callable[[], bool] = lambda: True
    ) -> None:
        """Send weights until no kind of instance is missing, as `reach` says."""
        began, excused = self._clock(), self._excused
        absent = 0.0  # seconds in which no instance was running
        relaying = 0.0  # seconds in which servers sent to others
        loading = 0.0  # seconds in which instances were prepared
        told: list[str] = []
        while True:
            await self._round()
            missing = missing_kinds()
            if not missing:
                return
            if not counts():
                began, excused, absent, relaying, loading = self._clock(), self._excused, 0.0, 0.0, 0.0
            nobody = [kind for kind in missing if not self._fleet.has_come(kind)]
            if nobody != told:
                told = nobody
                if nobody:
                    self._log("weights.waiting", kinds=nobody, instances=self._fleet.describe())
            if absent > self._start:
                raise TimeoutError(
                    f"no {' and no '.join(nobody or missing)} came up within {self._start:.0f} s; see its log: "
                    f"{self._fleet.describe()}"
                )
            elsewhere = absent + relaying + min(loading, LOADING_SECONDS) + self._excused - excused
            if self._clock() - began - elsewhere > self._deadline:
                raise TimeoutError(
                    f"no {' and no '.join(missing)} took {weights_name(version)} within {self._deadline:.0f} s: "
                    f"{self._fleet.describe()}"
                )
            before, relays, loads = self._clock(), self._relays.active, self._preparing.active
            await asyncio.sleep(RETRY_SECONDS)
            passed = self._clock() - before
            if nobody:
                absent += passed
            elif relays:
                relaying += passed
            elif loads:
                loading += passed

    async def hold(self) -> None:
        """Run as a background task. It sends the current version to late instances."""
        try:
            await asyncio.gather(self._hold_rounds(), self._hold_relays())
        finally:
            await self._relays.close()
            await self._preparing.close()

    async def _hold_rounds(self) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self._version is not None and not self._lock.locked():
                await self._round()

    async def _hold_relays(self) -> None:
        """While a round waits for the trainers, servers send to those that come meanwhile."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self._version is not None and self._lock.locked():
                self._relay(self._stale(self._version), busy=True)

    def _stale(self, version: int) -> list[Target]:
        """The instances that lack their version, and to which nobody sends one now."""
        stale = [t for t in self._fleet.stale_targets(version) if not self._preparing.running(t)]
        return [t for t in stale if t.name not in self._sending and not self._relays.running(t)]

    def _relay(self, stale: Sequence[Target], busy: bool) -> list[Target]:
        """Let servers send to those that the trainers cannot send to. `busy` says that the trainers send to others.
        Returns the instances that are left for the trainers."""
        rest = list(stale)
        for version in sorted({self._wanted(target) for target in stale}):
            # Nobody waits long for the model before SFT. The trainers hold it only before SFT.
            if version == BEFORE_SFT or (not busy and self._ranks.can_send(version)):
                continue
            chosen = self._relays.choose(version, [t for t in stale if self._wanted(t) == version])
            self._relays.start(version, chosen)
            rest = [target for target in rest if target not in chosen]
        return rest

    def _wanted(self, target: Target) -> int:
        assert self._version is not None
        return self._version if target.version is None else target.version

    async def _round(self) -> None:
        """Make one transfer of one version, which is the oldest one that an instance lacks."""
        async with self._lock:
            if self._version is None:
                return
            chosen = self._chosen(self._relay(self._stale(self._version), busy=False))
            if not chosen:
                return
            version = min(self._wanted(target) for target in chosen)
            chosen = [target for target in chosen if self._wanted(target) == version]
            self._sending = frozenset(target.name for target in chosen)
            try:
                for target in chosen:
                    self._fleet.update(target.name, True)
                await self._transfer(version, chosen)
            finally:
                self._sending = frozenset()
                for target in chosen:
                    self._fleet.update(target.name, False)

    async def _transfer(self, version: int, chosen: Sequence[Target]) -> None:
        """Send a version to the chosen instances that can take it."""
        targets, problems = await self._preparing.ready(chosen, PREPARE_SECONDS)
        for target, problem in problems:
            self._fleet.failed(target.name, f"could not be prepared: {problem}")
        if not targets:
            return

        asked = began = self._clock()
        beside = self._ranks.keeps_versions

        async def publish() -> Published | None:
            nonlocal began
            # The trainers may have gone on while this waited for them. They then hold other weights.
            held = self._version if version == BEFORE_SFT else self._ranks.step
            if not beside and held != version:
                return None
            began = self._clock()
            try:
                return await self._publisher.publish(version, targets, beside)
            except TrainerLost:
                if self._relays.choose(version, targets):
                    return None  # servers can send it while the trainers are restored
                raise

        if beside:
            published = await self._ranks.at_version(version, publish)
        else:
            published = await self._ranks.at_target(publish)
        ended = self._clock()
        if published is None:
            self._excused += ended - asked
            return
        if beside and published.result is not None:
            self._timeline.add(published.result.spans)
        seconds = ended - began
        self._excused += began - asked + min(published.byte_seconds, seconds)
        self._judge(version, targets, published, seconds)
        self._log("weights.published", version=version, errors={n: e for n, e in published.errors.items() if e})

    def _chosen(self, stale: Sequence[Target]) -> list[Target]:
        """The instances of the next transfer. These are all except the doubted ones. If only doubted ones are left,
        they are half of those that have not failed alone yet, so that a working one is found soon. Instances with no
        other at their address come first, because usually a whole pod cannot be reached. If all have failed alone, it
        is the first one whose pause is over."""
        stale = [target for target in stale if target.kind in self._takers]
        known = {target: self._doubts.get(target.name) for target in stale}
        doubtful = {t: doubt for t, doubt in known.items() if doubt is not None and doubt.incarnation == t.incarnation}
        trusted = [target for target in stale if target not in doubtful]
        if trusted:
            return trusted
        due = [target for target, doubt in doubtful.items() if doubt.until <= self._clock()]
        due.sort(key=lambda target: doubtful[target].until)
        beside = Counter(urlsplit(target.url).hostname for target in doubtful)
        new = [target for target in due if doubtful[target].failures == 0]
        new.sort(key=lambda target: beside[urlsplit(target.url).hostname])
        return new[: max(1, len(new) // 2)] or due[:1]

    def _judge(self, version: int, targets: Sequence[Target], published: Published, seconds: float) -> None:
        """Trust the instances that have the weights, and doubt those that failed first. The others are tried again
        together."""
        for target in targets:
            name, problem = target.name, published.errors[target.name]
            if problem is None and published.result is not None:
                self._doubts.pop(name, None)
                self._fleet.weights_acked(name, target.incarnation, version)
                continue
            # It may hold this version, the last one or none.
            self._fleet.transfer_failed(name, target.incarnation, name in published.blamed)
            if problem is not None and (name in published.blamed or not published.blamed):
                self._log("weights.failed", instance=name, version=version, reason=problem)
                self._fleet.failed(name, f"weight transfer: {problem}")
                if name in published.blamed:
                    self._doubt(target, seconds if len(targets) == 1 else None)

    def _doubt(self, target: Target, alone: float | None) -> None:
        """Doubt an instance. `alone` is the seconds of an attempt for this instance alone. It is None if others took
        part in the attempt."""
        old, failures, pause = self._doubts.get(target.name), 0, 0.0
        if alone is not None:
            failures = 1 + (old.failures if old is not None and old.incarnation == target.incarnation else 0)
            pause = min(LONGEST_PAUSE_SECONDS, alone * PAUSE * 2.0 ** (failures - 1))
        self._doubts[target.name] = _Doubt(target.incarnation, failures, self._clock() + pause)
