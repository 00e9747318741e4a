"""Private parts of other packages that the operator uses. Each has the reason and the version in which it was seen.

tests/unit/operator/test_compat_operator.py fails with the name of the part that has moved."""

from __future__ import annotations

from typing import Any

import aiohttp
from kubernetes.aio.client import ApiException, V1Lease, V1ObjectMeta
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock as _LeaseLock

# The errors of a call when the API server does not answer.
NO_ANSWER = (aiohttp.ClientError, OSError, TimeoutError)


class LeaseLock(_LeaseLock):  # type: ignore[misc]
    """The lock of kubernetes 37.0.2 with two corrections. The package's `create` passes an argument that its own client
    refuses. Its `update` does not keep the answer. This class uses `api_instance`, `lease_reference` and
    `update_lease`, which are not documented. `refused` has the HTTP status with which the last write was refused."""

    lease_reference: Any
    refused = 0

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        body = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        self.refused = 0
        try:
            await self.api_instance.create_namespaced_lease(namespace, body)
        except ApiException as error:
            self.refused = error.status
            return False
        except NO_ANSWER:
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Keep the answer, which the package's own method does not. Otherwise the lease would have to be read before
        each update."""
        self.refused = 0
        try:
            lease = self.lease_reference
            lease.spec = self.update_lease(updated_record, lease.spec)
            self.lease_reference = await self.api_instance.replace_namespaced_lease(name, namespace, lease)
        except ApiException as error:
            self.refused = error.status
            return False
        return True

    async def hand_over(self) -> None:
        """Write that nobody holds the lease, which `get` has read. Raises ApiException or one of NO_ANSWER."""
        lease = self.lease_reference
        lease.spec.holder_identity = None
        await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)
