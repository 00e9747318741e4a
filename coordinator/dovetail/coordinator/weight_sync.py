"""Keeps every rollout and scorer on the current weights: after each step all of them, in between whoever comes late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from dovetail.coordinator.publishing import Published, Publisher, Target
from dovetail.coordinator.trainer_session import TrainerSession

RETRY_SECONDS = 0.25


class Fleet(Protocol):
    """What the fleet knows of its instances."""

    def stale_targets(self, version: int) -> Sequence[Target]:
        """Instances that are up but do not hold `version`."""

    def has_current(self, kind: str) -> bool:
        """Whether an instance of that kind may take work."""

    def weights_acked(self, name: str, incarnation: str, version: int) -> None: ...
    def failed(self, name: str, reason: str) -> None: ...
    def describe(self) -> str:
        """One line on every instance, for error messages."""


class WeightSync:
    """`prepare` readies an instance for weights (a scorer must hold the models first); it may raise OSError."""

    def __init__(
        self,
        fleet: Fleet,
        publisher: Publisher,
        session: TrainerSession,
        prepare: Callable[[Target], Awaitable[None]],
        kinds: Sequence[str],
        log: Callable[..., None],
        deadline_seconds: float,
    ) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._session = session
        self._prepare = prepare
        self._kinds = kinds
        self._log = log
        self._deadline = deadline_seconds
        self._lock = asyncio.Lock()
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version that instances must hold to take work; None before PPO."""
        return self._version

    async def publish(self, version: int) -> None:
        """Make `version` current; returns when at least one instance of each kind holds it.

        Raises TimeoutError naming what was waited for."""
        self._version = version
        end = time.monotonic() + self._deadline
        while True:
            await self._round()
            missing = [kind for kind in self._kinds if not self._fleet.has_current(kind)]
            if not missing:
                return
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no {' and no '.join(missing)} took weight version {version} within {self._deadline:.0f} s: "
                    f"{self._fleet.describe()}"
                )
            await asyncio.sleep(RETRY_SECONDS)

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
            for target in self._fleet.stale_targets(version):
                if target.kind not in self._kinds:
                    continue
                try:
                    await self._prepare(target)
                except (OSError, TimeoutError) as error:
                    self._fleet.failed(target.name, f"could not be prepared: {error}")
                    continue
                targets.append(target)
            if not targets:
                return

            async def publish() -> Published | None:
                # A step may have been taken while this waited for the trainers: its own round follows.
                if self._session.step != version:
                    return None
                return await self._publisher.publish(version, targets)

            published = await self._session.at_target(publish)
            if published is None:
                return
        by_name = {t.name: t for t in targets}
        for name, problem in published.errors.items():
            if problem is None and published.result is not None:
                self._fleet.weights_acked(name, by_name[name].incarnation, version)
            elif problem is not None:
                self._fleet.failed(name, f"weight transfer: {problem}")
        self._log("weights.published", version=version, errors={n: e for n, e in published.errors.items() if e})
