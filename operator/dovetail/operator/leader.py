"""Leader election by Lease, with the `kubernetes` package's own implementation, made to bear an absent API server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, V1Lease, V1ObjectMeta
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

LEASE = "dovetail-operator"
# A leader that dies is replaced within LEASE_SECONDS + RETRY_SECONDS, one that leaves within RETRY_SECONDS.
LEASE_SECONDS = 10
RENEW_SECONDS = 7
RETRY_SECONDS = 2
_AWAY = (aiohttp.ClientError, OSError, TimeoutError)


class Lock(LeaseLock):  # type: ignore[misc]
    """An API server that does not answer is a failure to renew, not the end of the process. `attempted` is called with
    every answer."""

    def __init__(self, name: str, namespace: str, identity: str, api: ApiClient, attempted: Callable[[], None]) -> None:
        super().__init__(name, namespace, identity, api)
        self._attempted = attempted

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        try:
            found: tuple[bool, Any] = await super().get(name, namespace)
        except _AWAY as error:
            return False, ApiException(status=0, reason=f"the API server does not answer: {error}")
        self._attempted()
        return found

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        # Not super(): release 37 passes an argument there that its own client refuses.
        body = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, body)
        except (ApiException, *_AWAY):
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        try:
            return bool(await super().update(name, namespace, updated_record))
        except _AWAY:
            return False

    async def release(self) -> None:
        """Let the next replica lead at once, if the lease is ours."""
        there, record = await self.get(self.name, self.namespace)
        if there and record is not None and record.holder_identity == self.identity:
            self.lease_reference.spec.holder_identity = None
            try:
                await self.api_instance.replace_namespaced_lease(self.name, self.namespace, self.lease_reference)
            except (ApiException, *_AWAY):
                return


async def lead(lock: Lock, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait for the lease, run `work`, and return when the lease is lost."""

    async def lost() -> None:
        return

    await LeaderElection(Config(lock, LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, work, lost)).run()
