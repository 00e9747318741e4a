"""Leader election by Lease, with the code of the `kubernetes` package. It tolerates an API server that does not
answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kubernetes.aio.client import ApiClient, ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord

from dovetail.operator.compat import NO_ANSWER, LeaseLock

# The chart makes it, and the operator only writes to it. So it goes with the release, and Helm refuses a second release
# in a namespace: its operator would never work.
LEASE = "dovetail-leader"
# A leader that dies is replaced within LEASE_SECONDS + RETRY_SECONDS, one that leaves within RETRY_SECONDS.
# Calls to an API server under load take seconds, and that ends no leader.
LEASE_SECONDS = 30
RENEW_SECONDS = 20
RETRY_SECONDS = 2
# Of each call. The package itself would wait for minutes where a connection is broken and nobody tells.
ANSWER_SECONDS = 8
# A leader stops this long before another replica may take the lease.
MARGIN_SECONDS = 1


class Lock(LeaseLock):
    """A lease lock for which an API server that does not answer is a failed renewal, not the end of the process.
    `attempted` is called after every answer."""

    def __init__(self, name: str, namespace: str, identity: str, api: ApiClient, attempted: Callable[[], None]) -> None:
        super().__init__(name, namespace, identity, api)
        self._attempted = attempted
        self.renewed = float("-inf")  # monotonic seconds; when the last renewal that worked was sent

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found: tuple[bool, Any] = await super().get(name, namespace)
        except NO_ANSWER as error:
            return False, ApiException(status=0, reason=f"the API server does not answer: {error}")
        self._attempted()
        return found

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        return await self._hold(super().create(name, namespace, election_record))

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        return await self._hold(super().update(name, namespace, updated_record))

    async def _hold(self, writing: Coroutine[Any, Any, bool]) -> bool:
        sent = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                done = bool(await writing)
        except NO_ANSWER:
            return False
        self.renewed = sent if done else self.renewed
        return done

    async def release(self) -> None:
        """Give the lease up, if it is ours, so that the next replica leads at once."""
        there, record = await self.get(self.name, self.namespace)
        if there and record is not None and record.holder_identity == self.identity:
            with contextlib.suppress(ApiException, *NO_ANSWER):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self.hand_over()


async def lead(lock: Lock, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait for the lease, run `work`, and return when the lease is lost. `work` has ended before another replica may
    have the lease, whatever the API server does, and also when this is cancelled."""
    over = asyncio.Event()
    working: list[asyncio.Task[None]] = []

    async def held() -> None:
        task = asyncio.create_task(work())
        working.append(task)
        while not task.done() and (left := lock.renewed + LEASE_SECONDS - MARGIN_SECONDS - time.monotonic()) > 0:
            await asyncio.wait({task}, timeout=left)
        over.set()

    async def lost() -> None:
        return

    election = LeaderElection(Config(lock, LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, held, lost))
    electing, waiting = asyncio.create_task(election.run()), asyncio.create_task(over.wait())
    try:
        await asyncio.wait({electing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if electing.done():
            electing.result()
    finally:
        tasks = [electing, waiting, *working]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
