"""Leader election by Lease. It works even if the API server does not answer, or if somebody sets a clock.

The `kubernetes` package has an election, too, but it reads the time of day. A follower whose clock is set forward takes
the lease of a leader that still renews it. A follower whose clock is set back waits that much longer for a leader that
has died."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import ApiClient, ApiException
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord

from dovetail.operator.compat import NO_ANSWER, LeaseLock
from dovetail.protocol.process.endings import cancel

# The chart makes the lease, and the operator only writes to it. So it is deleted with the release. Helm refuses a
# second release in a namespace, whose operator would never work.
LEASE = "dovetail-leader"
# The claim on all namespaces. The API server keeps the namespace `default` in every cluster.
CLAIM, CLAIM_NAMESPACE = "dovetail-all-namespaces", "default"
# A leader that dies is replaced within LEASE_SECONDS + RETRY_SECONDS, and one that leaves within RETRY_SECONDS. Calls
# to an API server under load take seconds, and must not end a leader.
LEASE_SECONDS = 30
RETRY_SECONDS = 2
# The deadline of each call. The package itself would wait for minutes if a connection breaks without a notice.
ANSWER_SECONDS = 8
# A leader stops this long before another replica may take the lease.
MARGIN_SECONDS = 1


class Lock(LeaseLock):
    """A lease lock. If the API server does not answer, the renewal has failed, and the process goes on. `attempted` is
    called after every answer."""

    def __init__(self, name: str, namespace: str, identity: str, api: ApiClient, attempted: Callable[[], None]) -> None:
        super().__init__(name, namespace, identity, api)
        self._attempted = attempted
        self.renewed = float("-inf")  # when the last renewal that worked was sent, in monotonic seconds

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
        self._attempted()
        self.renewed = sent if done else self.renewed
        return done

    def rival(self, identity: str) -> None:
        """Called when another one that holds the lease is seen to renew it."""

    async def held(self) -> bool:
        """Whether the API server says that the lease is ours."""
        there, record = await self.get(self.name, self.namespace)
        return there and record is not None and bool(record.holder_identity == self.identity)

    async def release(self) -> None:
        """Give the lease up, if it is ours, so that the next replica leads at once."""
        if await self.held():
            with contextlib.suppress(ApiException, *NO_ANSWER):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self.hand_over()


class NoClaim(Exception):
    """The release cannot serve all namespaces. Another one does, or its claim cannot be read or written."""


class Claim(Lock):
    """The claim of a release on all namespaces. Its identity is the release's namespace, because only the leader of a
    release, which holds `lock`, asks for it. Two releases that correct the same objects would never end, so the second
    one gives up."""

    def __init__(self, lock: Lock, api: ApiClient, attempted: Callable[[], None]) -> None:
        super().__init__(CLAIM, CLAIM_NAMESPACE, lock.namespace, api, attempted)
        self._lock = lock
        self._since: float | None = None  # when the claim was first refused, in monotonic seconds

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """Raises NoClaim."""
        there, found = await super().get(name, namespace)
        if not there and found.status == 403:  # a claim that is missing may yet be made
            self._was_refused(403)
        return there, found

    async def _hold(self, writing: Coroutine[Any, Any, bool]) -> bool:
        done = await super()._hold(writing)
        if not done and self.refused in (403, 404):
            self._was_refused(self.refused)
        return done

    def _was_refused(self, status: int) -> None:
        """Raises NoClaim if this has lasted. An installation makes Leases and rights last."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - max(self._since, self.renewed) >= LEASE_SECONDS:
            raise NoClaim(
                f"the API server refuses the Lease {CLAIM} of the namespace {CLAIM_NAMESPACE} with status {status}: if "
                "it is missing, upgrade the release, which makes it; with `rbac.create: false`, let the operator's "
                f"ServiceAccount `get` and `update` leases of this name in the namespace {CLAIM_NAMESPACE}"
            )

    async def held(self) -> bool:
        """Also whether this replica leads its release. All replicas have the claim's identity. The claim is read first,
        so that a leader who has come since has changed it, and it cannot be written any more."""
        with contextlib.suppress(NoClaim):  # a claim that cannot be read cannot be given up
            return await super().held() and await self._lock.held()
        return False

    def rival(self, identity: str) -> None:
        """Raises NoClaim."""
        raise NoClaim(
            f"the operator in namespace {identity} serves all namespaces, and this one would undo its work: uninstall "
            f"one of the two releases, or name the `namespaces` of each (lease {CLAIM_NAMESPACE}/{CLAIM})"
        )


class Election:
    """One replica's part in the election. It takes a lease that another replica holds if the lease has not changed for
    LEASE_SECONDS on its own monotonic clock. The times that are written in the lease are only for people."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._mine: LeaderElectionRecord | None = None  # this replica's last record, if nobody can have written since
        self._other: dict[str, Any] = {}  # another replica's lease as it was read last
        self._changed = float("-inf")  # when this record was first read, in monotonic seconds

    async def hold(self) -> bool:
        """Take the lease, or renew it. Returns whether that worked. A renewal takes one request, because an API server
        under load takes seconds for each. The lease is read again after a renewal that failed."""
        lock, now = self._lock, datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        mine = LeaderElectionRecord(lock.identity, str(LEASE_SECONDS), now, now)
        before, self._mine = self._mine, None
        if before is not None:
            mine.acquire_time = before.acquire_time
            return await self._update(mine)
        there, found = await lock.get(lock.name, lock.namespace)
        if not there:
            missing = isinstance(found, ApiException) and found.status == 404
            return missing and await lock.create(lock.name, lock.namespace, mine)
        if found.holder_identity == lock.identity:
            mine.acquire_time = found.acquire_time or now
        elif found.holder_identity is not None:
            if vars(found) != self._other:
                if self._other:
                    lock.rival(found.holder_identity)
                self._other, self._changed = dict(vars(found)), time.monotonic()
            if time.monotonic() - self._changed < LEASE_SECONDS:
                return False
        self._other = {}
        return await self._update(mine)

    async def _update(self, mine: LeaderElectionRecord) -> bool:
        done = await self._lock.update(self._lock.name, self._lock.namespace, mine)
        self._mine = mine if done else None
        return done

    async def win(self) -> None:
        """Wait for the lease."""
        while True:
            if await self.hold():
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def renew(self) -> None:
        """Renew the lease until another replica has it."""
        while not self._other:
            await asyncio.sleep(RETRY_SECONDS)
            await self.hold()


async def lead(lock: Lock, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait for the lease, run `work`, and return when the lease is lost. `work` always ends before another replica may
    take the lease, even if the API server fails or this call is cancelled. Raises NoClaim, and what `work`
    raises."""
    election = Election(lock)
    await election.win()
    working, renewing = asyncio.create_task(work()), asyncio.create_task(election.renew())
    tasks = {working, renewing}
    try:
        while (left := lock.renewed + LEASE_SECONDS - MARGIN_SECONDS - time.monotonic()) > 0:
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if done:
                return
    finally:
        await cancel(tasks)
