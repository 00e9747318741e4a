"""Servers that leave their GPU to the scorer beside them: vLLM's sleep, level 1 (weights to host memory, no cache).

Only where a rollout announces it (`abilities.sleep`: its group's vllmArgs hold `--enable-sleep-mode`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import aiohttp

from dovetail.coordinator.fleet import Fleet, Instance

SECONDS = 120.0


class Sleepers:
    """A sleeping server is drained in the fleet: it gets no requests until `wake`. `session`: with the job's token.

    `on_swapped(name, way, seconds)`: how long going to sleep (`in`: the scorer may come) or waking (`out`) took."""

    def __init__(
        self,
        fleet: Fleet,
        session: Callable[[], aiohttp.ClientSession],
        log: Callable[..., None],
        on_swapped: Callable[[str, str, float], None] = lambda name, way, seconds: None,
    ) -> None:
        self._fleet, self._session, self._log, self._on_swapped = fleet, session, log, on_swapped
        # By name: the incarnation that sleeps, and its way there.
        self._asleep: dict[str, tuple[str, asyncio.Task[bool]]] = {}

    def free(self, names: Iterable[str]) -> None:
        """These have nothing left to generate: those that can go to sleep do."""
        for name in names:
            instance = self._fleet.get(name)
            if instance is None or not instance.abilities.get("sleep") or self._known(instance):
                continue
            self._fleet.drain(name)
            way = asyncio.create_task(self._post(instance, "/sleep?level=1", "in"))
            self._asleep[name] = (instance.incarnation, way)

    def out_of_the_way(self, name: str) -> bool:
        """Whether the scorer beside a freed server may use the device: the server sleeps, or cannot."""
        instance = self._fleet.get(name)
        if instance is None or not instance.abilities.get("sleep"):
            return True
        return self._known(instance) and self._asleep[name][1].done()

    async def wake(self, name: str) -> None:
        """Before it takes weights or requests. Raises OSError when it cannot; it is then drained no longer, so that its
        failures are seen."""
        if name not in self._asleep:
            return
        incarnation, way = self._asleep.pop(name)
        await asyncio.wait([way])
        instance = self._fleet.get(name)
        awake = True
        if instance is not None and instance.incarnation == incarnation and way.result():
            awake = await self._post(instance, "/wake_up", "out")
        self._fleet.drain(name, False)
        if not awake:
            raise OSError(f"{name} did not wake up")

    async def wake_all(self) -> None:
        """Those that cannot are failures of the fleet's."""
        for name in list(self._asleep):
            try:
                await self.wake(name)
            except OSError as error:
                self._fleet.failed(name, str(error))

    def close(self) -> None:
        for _, way in self._asleep.values():
            way.cancel()

    def _known(self, instance: Instance) -> bool:
        return self._asleep.get(instance.name, ("", None))[0] == instance.incarnation

    async def _post(self, instance: Instance, route: str, way: str) -> bool:
        started = time.monotonic()
        error: str | None = None
        try:
            timeout = aiohttp.ClientTimeout(total=SECONDS)
            async with self._session().post(instance.url + route, timeout=timeout) as response:
                if response.status != 200:
                    error = f"status {response.status}: {(await response.text())[:300]}"
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        seconds = time.monotonic() - started
        self._log("instance.swapped", instance=instance.name, way=way, seconds=round(seconds, 3), error=error)
        if error is None:
            self._on_swapped(instance.name, way, seconds)
        return error is None
