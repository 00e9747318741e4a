"""Servers that leave their GPU to the scorer or the trainers beside them: vLLM's sleep, level 1 (weights to host
memory, no cache).

Only where a rollout announces it (`abilities.sleep`: it runs with `--enable-sleep-mode`, as servers of groups that also
train do on GPUs). The scorer's own weights come from host memory meanwhile (`abilities.host_weights`), and go before
the server wakes or trainers begin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import aiohttp

from dovetail.coordinator.fleet.fleet import Fleet, Instance

SECONDS = 120.0


class Sleepers:
    """A sleeping server is drained in the fleet: it gets no requests until `wake`. `session`: with the job's token.

    `on_swapped(name, way, seconds)`: how long going to sleep (`in`: the scorer may come) or waking (`out`) took."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        log: Callable[..., None],
        on_swapped: Callable[[str, str, float], None] = lambda name, way, seconds: None,
    ) -> None:
        self._fleet, self._session, self._log, self._on_swapped = fleet, session, log, on_swapped
        # By name: the incarnation that sleeps, and its way there.
        self._asleep: dict[str, tuple[str, asyncio.Task[bool]]] = {}
        # By scorer: the incarnation that was told of its turn.
        self._expecting: dict[str, str] = {}
        self._told: set[asyncio.Task[bool]] = set()
        # By rollout: the incarnation of the scorer that has left the device to trainers.
        self._resting: dict[str, str] = {}

    def expect(self, names: Iterable[str]) -> None:
        """These make their last steps, until their samples go elsewhere: their scorers bring in what has room beside
        them. Once a turn."""
        for name in names:
            scorer = self._scorer(name)
            if scorer is not None and self._expecting.get(scorer.name) != scorer.incarnation:
                self._expecting[scorer.name] = scorer.incarnation
                task = asyncio.create_task(self._post(scorer, "/v1/bring", None))
                self._told.add(task)
                task.add_done_callback(self._told.discard)

    def free(self, names: Iterable[str]) -> None:
        """These have nothing left to generate: those that can go to sleep do."""
        for name in names:
            instance = self._fleet.get(name)
            if instance is None or not instance.abilities.get("sleep") or self._known(instance):
                continue
            self._fleet.drain(name)
            way = asyncio.create_task(self._give_way(instance))
            self._asleep[name] = (instance.incarnation, way)

    async def rest(self, names: Iterable[str]) -> None:
        """Leave their devices to the trainers: those that can sleep are asleep when this returns (or failed to be), and
        their scorers' weights in host memory."""
        ways = []
        for name in names:
            instance = self._fleet.get(name)
            if instance is None or not instance.abilities.get("sleep"):
                continue
            if not self._known(instance):
                self._fleet.drain(name)
                way = asyncio.create_task(self._post(instance, "/sleep?level=1", "in"))
                self._asleep[name] = (instance.incarnation, way)
            ways.append(self._asleep[name][1])
            if (scorer := self._scorer(name)) is not None and self._resting.get(name) != scorer.incarnation:
                self._resting[name] = scorer.incarnation
                ways.append(asyncio.create_task(self._post(scorer, "/v1/leave", None)))
        if ways:
            await asyncio.wait(ways)

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
        self._resting.pop(name, None)
        await asyncio.wait([way])
        instance = self._fleet.get(name)
        awake = True
        scorer = self._scorer(name)
        if scorer is not None:
            self._expecting.pop(scorer.name, None)
            await self._post(scorer, "/v1/leave", None)
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
        for way in [way for _, way in self._asleep.values()] + list(self._told):
            way.cancel()

    async def _give_way(self, instance: Instance) -> bool:
        asleep = await self._post(instance, "/sleep?level=1", "in")
        scorer = self._scorer(instance.name)
        if asleep and scorer is not None:
            # Now there is room for all of them; the first chunk need not wait for the answer.
            await self._post(scorer, "/v1/bring", None)
        return asleep

    def _scorer(self, rollout: str) -> Instance | None:
        """The one beside a rollout, if its weights are in host memory."""
        scorer = self._fleet.get(f"{rollout}-scorer")
        return scorer if scorer is not None and scorer.abilities.get("host_weights") else None

    def _known(self, instance: Instance) -> bool:
        return self._asleep.get(instance.name, ("", None))[0] == instance.incarnation

    async def _post(self, instance: Instance, route: str, way: str | None) -> bool:
        """`way`: what is logged and measured as a swap; None: a scorer's part, whose failure its chunks will show."""
        started = time.monotonic()
        error: str | None = None
        try:
            timeout = aiohttp.ClientTimeout(total=SECONDS)
            async with self._session.post(instance.url + route, timeout=timeout) as response:
                if response.status != 200:
                    error = f"status {response.status}: {(await response.text())[:300]}"
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        seconds = time.monotonic() - started
        name = way or route.rsplit("/", 1)[1]
        self._log("instance.swapped", instance=instance.name, way=name, seconds=round(seconds, 3), error=error)
        if error is None and way is not None:
            self._on_swapped(instance.name, way, seconds)
        return error is None
