"""Keeps every rollout and scorer on the current weights: after each step all of them, in between whoever comes late."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from dovetail.coordinator.trainers.trainer_session import TrainerSession
from dovetail.coordinator.weights.publishing import Published, Publisher, Target

RETRY_SECONDS = 0.25
# A failed attempt to send to a doubtful instance is followed by a pause so many times as long, twice that after each
# further one: trainers can do nothing else meanwhile.
PAUSE, LONGEST_PAUSE_SECONDS = 4.0, 600.0


class Receivers(Protocol):
    """What the fleet knows of its instances."""

    def stale_targets(self, version: int) -> Sequence[Target]:
        """Instances that are up but do not hold `version`."""

    def has_current(self, kind: str) -> bool:
        """Whether an instance of that kind may take work."""

    def has_come(self, kind: str) -> bool:
        """Whether an instance of that kind is up, with whatever weights."""

    def weights_acked(self, name: str, incarnation: str, version: int) -> None: ...
    def failed(self, name: str, reason: str) -> None: ...
    def describe(self) -> str:
        """One line on every instance, for error messages."""


@dataclass(frozen=True)
class _Doubt:
    """Of a process that failed a transfer: `failures` of them by itself, `until`: no further attempt before."""

    incarnation: str
    failures: int
    until: float


class WeightSync:
    """`prepare` readies an instance for weights (a scorer must hold the models first); it may raise OSError.
    `deadline_seconds`: for weights to instances that are up; `start_seconds`: for the first instance of a kind to come
    up, infinity where something else limits that. `clock`: monotonic seconds.

    A transfer goes to all that lack the version at once, and one that cannot be reached would hold up everyone, again
    and again: so an instance of which a transfer failed is then served by itself, after the others."""

    def __init__(
        self,
        fleet: Receivers,
        publisher: Publisher,
        session: TrainerSession,
        prepare: Callable[[Target], Awaitable[None]],
        kinds: Sequence[str],
        log: Callable[..., None],
        deadline_seconds: float,
        start_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._session = session
        self._prepare = prepare
        self._kinds = kinds
        self._log = log
        self._deadline = deadline_seconds
        self._start = start_seconds
        self._clock = clock
        self._doubts: dict[str, _Doubt] = {}
        self._lock = asyncio.Lock()
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version that instances must hold to take work; None before PPO."""
        return self._version

    async def publish(self, version: int) -> None:
        """Make `version` current; returns when at least one instance of each kind holds it.

        Time in which no instance of a kind is up counts against `start_seconds`: its pod may wait for a node or an
        image. Raises TimeoutError naming what was waited for."""
        self._version = version
        began = self._clock()
        absent = 0.0  # seconds in which nobody was up
        told: list[str] = []
        while True:
            await self._round()
            missing = [kind for kind in self._kinds if not self._fleet.has_current(kind)]
            if not missing:
                return
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
            if self._clock() - began - absent > self._deadline:
                raise TimeoutError(
                    f"no {' and no '.join(missing)} took weight version {version} within {self._deadline:.0f} s: "
                    f"{self._fleet.describe()}"
                )
            before = self._clock()
            await asyncio.sleep(RETRY_SECONDS)
            absent += self._clock() - before if nobody else 0.0

    async def hold(self) -> None:
        """Background: bring late instances to the current version."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self._version is not None and not self._lock.locked():
                await self._round()

    async def _round(self) -> None:
        async with self._lock:
            version = self._version
            if version is None:
                return
            targets = []
            for target in self._chosen(self._fleet.stale_targets(version)):
                try:
                    await self._prepare(target)
                except (OSError, TimeoutError) as error:
                    self._fleet.failed(target.name, f"could not be prepared: {error}")
                    continue
                targets.append(target)
            if not targets:
                return

            began = self._clock()

            async def publish() -> Published | None:
                nonlocal began
                # A step may have been taken while this waited for the trainers: its own round follows.
                if self._session.step != version:
                    return None
                began = self._clock()
                return await self._publisher.publish(version, targets)

            published = await self._session.at_target(publish)
            if published is None:
                return
        self._judge(version, targets, published, self._clock() - began)
        self._log("weights.published", version=version, errors={n: e for n, e in published.errors.items() if e})

    def _chosen(self, stale: Sequence[Target]) -> list[Target]:
        """All of them, but those that kept others from their weights. When nobody else waits: half of those that have
        not failed since, so that one that works among many is soon found, those alone at their address first: what
        cannot be reached is mostly a whole pod. Else the one whose time has come."""
        stale = [target for target in stale if target.kind in self._kinds]
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
        """Who has the weights is trusted, who failed first is doubted; the others are tried again together."""
        for target in targets:
            name, problem = target.name, published.errors[target.name]
            if problem is None and published.result is not None:
                self._doubts.pop(name, None)
                self._fleet.weights_acked(name, target.incarnation, version)
            elif problem is not None and (name in published.blamed or not published.blamed):
                self._log("weights.failed", instance=name, version=version, reason=problem)
                self._fleet.failed(name, f"weight transfer: {problem}")
                if name in published.blamed:
                    self._doubt(target, seconds if len(targets) == 1 else None)

    def _doubt(self, target: Target, alone: float | None) -> None:
        """`alone`: seconds of an attempt for it only."""
        old, failures, pause = self._doubts.get(target.name), 0, 0.0
        if alone is not None:
            failures = 1 + (old.failures if old is not None and old.incarnation == target.incarnation else 0)
            pause = min(LONGEST_PAUSE_SECONDS, alone * PAUSE * 2.0 ** (failures - 1))
        self._doubts[target.name] = _Doubt(target.incarnation, failures, self._clock() + pause)
