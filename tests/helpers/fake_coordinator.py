"""A coordinator for tests of trainer ranks: the real routes and the real trainer group, but commands and batches come
from the test, and nothing is stored."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
from aiohttp import web
from prometheus_client import CollectorRegistry

from dovetail.coordinator.serving.coordinator_routes import make_app
from dovetail.coordinator.workers.trainer_group import TrainerGroup, TrainerPosition
from dovetail.protocol.messages import Command, CommandResult, Offer, Register
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.wire import pack, row_lengths, unpack
from helpers.free_ports import free_port
from helpers.patience import PATIENCE

T = TypeVar("T")
TOKEN = "a-test-token"


def as_stored(batch: bytes) -> bytes:
    """A batch of `ppo_batch` as a coordinator stores it: without columns that no row uses, and 0 after a row's end."""
    arrays = unpack(batch)
    for name in arrays:
        lengths = row_lengths(name, arrays)
        if lengths is not None:
            table = arrays[name][:, : lengths.max()]
            inside = np.arange(table.shape[1])[None, :] < lengths[:, None]
            arrays[name] = np.where(inside, table, np.zeros(1, table.dtype))
    return pack(arrays)


class FakeCoordinator:
    """Runs in a thread of its own; every method may be called from the test's thread.

    `batches` maps keys to safetensors documents, `results` collects what ranks hand in, `events` what happened,
    `asked` the keys of the batches that ranks have got."""

    def __init__(self, world_size: int, peer_timeout: float = 60.0) -> None:
        self.batches: dict[str, bytes] = {}
        self.results: list[CommandResult] = []
        self.asked: list[str] = []
        self.offers: list[Offer] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._world_size, self._peer_timeout = world_size, peer_timeout
        self._generation = (1, False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = free_port()
        self.trainers: TrainerGroup
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Serve, on the same port as before; a restarted coordinator knows the generation and nothing else."""
        self._call(self._start())

    def stop(self) -> None:
        """Vanish: open polls are cut off."""
        self._call(self._stop())

    def close(self) -> None:
        self.stop()
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)

    async def _start(self) -> None:
        generation, formed = self._generation
        self.trainers = TrainerGroup(
            world_size=self._world_size,
            generation=generation,
            formed=formed,
            peer_timeout=self._peer_timeout,
            clock=time.monotonic,
            record_generation=lambda g: None,
            record_result=self.results.append,
            log=lambda event, **fields: self.events.append((event, fields)),
        )
        self._runner = web.AppRunner(make_app(self, TOKEN, CollectorRegistry()), shutdown_timeout=0.1)  # type: ignore[arg-type]
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self._watch = asyncio.create_task(self._watch_silence())

    async def _stop(self) -> None:
        self._generation = (self.trainers.generation, self.trainers.formed)
        self._watch.cancel()
        await self._runner.cleanup()

    async def _end(self) -> None:
        """End the handlers, too, as `fake_kube.ServerThread` does."""
        await cancel(asyncio.all_tasks() - {asyncio.current_task()})

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.trainers.check_silence()

    # ------------------------------------------------------------ what tests ask for

    def execute(self, command: Command, timeout: float = PATIENCE) -> CommandResult:
        """Raises TrainerLost, TrainerError, TimeoutError."""
        return self._call(self._execute(command, timeout), timeout + PATIENCE)

    def position(self, timeout: float = PATIENCE) -> TrainerPosition:
        """Wait until a generation is formed and rank 0 asks for work."""
        return self._call(self.trainers.wait_position(timeout), timeout + 60)

    def wait_until(self, condition: Any, timeout: float = PATIENCE) -> None:
        """Poll `condition()`; raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the condition did not come true")
            time.sleep(0.02)

    async def _execute(self, command: Command, timeout: float) -> CommandResult:
        await self.trainers.wait_position(PATIENCE)
        return await self.trainers.execute(command, timeout)

    def _call(self, work: Coroutine[Any, Any, T], timeout: float = PATIENCE) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    # ------------------------------------------------------------ what the routes ask for

    def retire(self, name: str, host: str | None = None) -> None:
        """Nothing to do: no test of trainers retires rollouts."""

    def left(self, name: str) -> bool:
        return True

    def register(self, message: Register) -> None:
        pass

    def offer(self, message: Offer) -> None:
        self.offers.append(message)

    async def batch(self, key: str) -> bytes:
        found = self.batches[key]
        self.asked.append(key)
        return as_stored(found) if key.startswith("ppo") else found

    def status(self) -> dict[str, Any]:
        return {}
