"""Puts servers to sleep, so that the scorer or the trainers on the same GPU can use it. It uses vLLM's sleep mode at
level 1. Weights go to host memory, and the KV cache is dropped.

Only a rollout that announces it can sleep (`abilities.sleep`). It runs with `--enable-sleep-mode`. On GPUs, the servers
of groups that also train announce it. The scorer's own weights are loaded from host memory meanwhile
(`abilities.host_weights`). They leave the GPU before the server wakes or the trainers begin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import aiohttp

from dovetail.coordinator.workers.fleet import Fleet, Instance, InstanceHealth
from dovetail.protocol.process.process_names import scorer_name

SECONDS = 120.0


class Sleepers:
    """The sleeping servers of a job. A sleeping server is drained in the fleet, so it gets no requests until `wake`. A
    server may also sleep because an earlier coordinator put it to sleep. It says so when it reports. `session` sends
    the job's token.

    `on_swapped(group, way, seconds)` is called with the seconds that a change took. `way` is `in` when the server goes
    to sleep (the scorer moves in), and `out` when the server wakes."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        log: Callable[..., None],
        on_swapped: Callable[[str, str, float], None] = lambda group, way, seconds: None,
    ) -> None:
        self._fleet, self._session, self._log, self._on_swapped = fleet, session, log, on_swapped
        # For each rollout's name, the incarnation that sleeps, and the task that puts it to sleep.
        self._asleep: dict[str, tuple[str, asyncio.Task[bool]]] = {}
        # For the name and incarnation of each rollout that is waking up, an event. It is set when the rollout is awake.
        self._waking: dict[tuple[str, str], asyncio.Event] = {}
        # For each scorer, the incarnation that was told to load its models.
        self._expecting: dict[str, str] = {}
        self._told: set[asyncio.Task[bool]] = set()
        # For each rollout, the incarnation of the scorer that has left the device to the trainers.
        self._resting: dict[str, str] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Call it when these rollouts run their last decode steps before their samples move away. Their scorers then
        load the weights that fit beside them. Only the first call in an iteration has an effect."""
        for name in names:
            scorer = self._scorer(name)
            if scorer is not None and self._expecting.get(scorer.name) != scorer.incarnation:
                self._expecting[scorer.name] = scorer.incarnation
                task = asyncio.create_task(self._post(scorer, "/v1/bring", None))
                self._told.add(task)
                task.add_done_callback(self._told.discard)

    def free(self, names: Iterable[str]) -> None:
        """Call it when these rollouts have nothing left to generate. Those that can sleep go to sleep."""
        self._find()
        for name in names:
            instance = self._fleet.get(name)
            if instance is None or not instance.abilities.get("sleep") or self._known(instance):
                continue
            self._fleet.drain(name)
            waking = self._waking.get((name, instance.incarnation))
            way = asyncio.create_task(self._give_way(instance, waking))
            self._asleep[name] = (instance.incarnation, way)

    async def rest(self, names: Iterable[str]) -> None:
        """Free the devices of these rollouts for the trainers. When it returns, the rollouts that can sleep are asleep
        (or have failed), and their scorers' weights are in host memory."""
        ways = []
        self._find()
        for name in names:
            instance = self._fleet.get(name)
            if instance is None or not instance.abilities.get("sleep"):
                continue
            if not self._known(instance):
                self._fleet.drain(name)
                waking = self._waking.get((name, instance.incarnation))
                way = asyncio.create_task(self._go_to_sleep(instance, waking))
                self._asleep[name] = (instance.incarnation, way)
            ways.append(self._asleep[name][1])
            if (scorer := self._scorer(name)) is not None and self._resting.get(name) != scorer.incarnation:
                self._resting[name] = scorer.incarnation
                ways.append(asyncio.create_task(self._post(scorer, "/v1/leave", None)))
        if ways:
            await asyncio.wait(ways)

    def out_of_the_way(self, name: str) -> bool:
        """Whether the scorer beside a freed server may use the device. It may if the server sleeps or cannot sleep."""
        instance = self._fleet.get(name)
        if instance is None or not instance.abilities.get("sleep"):
            return True
        self._find()
        return self._known(instance) and self._asleep[name][1].done()

    async def wake(self, name: str) -> None:
        """Wake a server before it takes weights or requests. Raises OSError if it fails. The server is then no longer
        drained, so that its failures are seen. If another call wakes it already, this waits for that."""
        instance = self._fleet.get(name)
        while instance is not None and (waking := self._waking.get((name, instance.incarnation))) is not None:
            await waking.wait()  # each of its calls has a time limit
        self._find()
        if name not in self._asleep:
            return
        incarnation, way = self._asleep.pop(name)
        self._resting.pop(name, None)
        awake = self._waking[name, incarnation] = asyncio.Event()
        try:
            await self._wake(name, incarnation, way)
        finally:
            del self._waking[name, incarnation]
            awake.set()

    async def _wake(self, name: str, incarnation: str, way: asyncio.Task[bool]) -> None:
        await asyncio.wait([way])
        instance = self._fleet.get(name)
        awake = True
        scorer = self._scorer(name)
        if scorer is not None:
            self._expecting.pop(scorer.name, None)
            await self._post(scorer, "/v1/leave", None)
        if instance is not None and instance.incarnation == incarnation and way.result():
            awake = await self._post(instance, "/wake_up", "out")
        if name not in self._asleep:  # else it goes to sleep again now
            self._fleet.woken(name, incarnation)
        if not awake:
            raise OSError(f"{name} did not wake up")

    async def wake_all(self) -> None:
        """Wake all servers. A server that does not wake counts as failed in the fleet."""
        self._find()
        for name in list(self._asleep):
            await self._woken(name)

    async def wake_current(self) -> None:
        """Wake the servers that hold the weights that they must hold. No transfer of weights wakes these. A server that
        does not wake counts as failed in the fleet."""
        self._find()
        current = [i.name for i in self._fleet.instances("rollout") if i.health is InstanceHealth.HEALTHY]
        await asyncio.gather(*(self._woken(name) for name in current if name in self._asleep))

    async def wake_found(self) -> None:
        """Wake the servers that hold the weights that they must hold, and that this coordinator has not put to sleep. A
        server that does not wake counts as failed in the fleet."""
        current = [i for i in self._fleet.instances("rollout") if i.health is InstanceHealth.HEALTHY]
        await asyncio.gather(*(self._woken(i.name) for i in current if i.sleeps and not self._known(i)))

    def _find(self) -> None:
        """Take over the sleeping servers that this coordinator has not put to sleep."""
        for instance in self._fleet.instances("rollout"):
            waking = (instance.name, instance.incarnation) in self._waking
            if instance.sleeps and not waking and not self._known(instance):
                way = asyncio.create_task(self._sleeps())
                self._asleep[instance.name] = (instance.incarnation, way)

    async def _sleeps(self) -> bool:
        return True

    async def _woken(self, name: str) -> None:
        try:
            await self.wake(name)
        except OSError as error:
            self._fleet.failed(name, str(error))

    def close(self) -> None:
        for way in [way for _, way in self._asleep.values()] + list(self._told):
            way.cancel()

    async def _give_way(self, instance: Instance, waking: asyncio.Event | None) -> bool:
        asleep = await self._go_to_sleep(instance, waking)
        scorer = self._scorer(instance.name)
        if asleep and scorer is not None:
            # There is room for all models now. The first batch does not need to wait for the answer.
            await self._post(scorer, "/v1/bring", None)
        return asleep

    async def _go_to_sleep(self, instance: Instance, waking: asyncio.Event | None) -> bool:
        """Put a server to sleep. Returns whether it sleeps. If the server is still waking up, `waking` is set when it
        is awake. This call waits for that, because the server would end up awake otherwise."""
        if waking is not None:
            await waking.wait()
        return await self._post(instance, "/sleep?level=1", "in")

    def _scorer(self, rollout: str) -> Instance | None:
        """The scorer beside a rollout, if it can keep its weights in host memory. Otherwise None."""
        scorer = self._fleet.get(scorer_name(rollout))
        return scorer if scorer is not None and scorer.abilities.get("host_weights") else None

    def _known(self, instance: Instance) -> bool:
        return self._asleep.get(instance.name, ("", None))[0] == instance.incarnation

    async def _post(self, instance: Instance, route: str, way: str | None) -> bool:
        """Send a POST request to an instance. Returns whether it succeeded. `way` is the direction under which the time
        is logged and measured as a swap. It is None for a request to a scorer, because its batches would show a
        failure."""
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
            self._on_swapped(instance.group, way, seconds)
        return error is None
