"""Finds out who the caller is and what they may do, with TokenReview and SubjectAccessReview. Answers are kept for a
few seconds."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dovetail.manifest.describe.crd import GROUP, PLURAL
from dovetail.statusapi.kube import KubeClient, create

T = TypeVar("T")
CACHED = 10_000  # entries of each cache


class Unauthenticated(Exception):
    """There is no token, or the cluster does not know it. The answer is HTTP 401."""


class Forbidden(Exception):
    """The user may not do this. The answer is HTTP 403."""


@dataclass(frozen=True)
class User:
    """A user as TokenReview describes them."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def tenant(self) -> str:
        """Who gets a share of this process: the user, or all ServiceAccounts of a namespace, because whoever may make
        one makes many."""
        accounts, _, name = self.name.rpartition(":")
        return accounts if name and accounts.startswith("system:serviceaccount:") else self.name


@dataclass(frozen=True)
class Access:
    """One question to RBAC. An empty `namespace` means all."""

    verb: str
    namespace: str
    name: str = ""
    group: str = GROUP
    resource: str = PLURAL
    subresource: str = ""

    def __str__(self) -> str:
        what = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        kind = f"{what}.{self.group}" if self.group else what
        return f"{self.verb} {kind}" + (f" {self.name}" if self.name else "") + f" in {place(self.namespace)}"


def place(namespace: str) -> str:
    return f"namespace {namespace}" if namespace else "all namespaces"


class _Cache(Generic[T]):
    """A cache of the newest entries. Each is kept for a limited time."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._entries: OrderedDict[Any, tuple[float, T]] = OrderedDict()

    def get(self, key: Any) -> T | None:
        found = self._entries.get(key)
        if found is None or found[0] <= self._clock():
            return None
        return found[1]

    def put(self, key: Any, value: T) -> None:
        self._entries[key] = (self._clock() + self._seconds, value)
        self._entries.move_to_end(key)
        while len(self._entries) > CACHED:
            self._entries.popitem(last=False)


class Auth:
    """Remembers the API server's answers for `seconds`, so a revoked right works for that time longer. Failed requests
    are not remembered."""

    def __init__(
        self, kube: KubeClient, seconds: float, audiences: tuple[str, ...], clock: Callable[[], float]
    ) -> None:
        self._kube, self._audiences = kube, audiences
        self._users: _Cache[User | str] = _Cache(seconds, clock)
        self._rights: _Cache[bool] = _Cache(seconds, clock)

    async def user(self, header: str | None) -> User:
        """The user of an Authorization header. Raises Unauthenticated or KubeError."""
        scheme, _, token = (header or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("send a Kubernetes bearer token, as `Authorization: Bearer TOKEN`")
        key = hashlib.sha256(token.encode()).digest()  # tokens themselves are not kept
        found = self._users.get(key)
        if found is None:
            found = await self._review(token)
            self._users.put(key, found)
        if isinstance(found, str):
            raise Unauthenticated(found)
        return found

    async def _review(self, token: str) -> User | str:
        spec: dict[str, Any] = {"token": token}
        if self._audiences:
            spec["audiences"] = list(self._audiences)
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        status = (await create(self._kube, "/apis/authentication.k8s.io/v1/tokenreviews", body)).get("status", {})
        if not status.get("authenticated"):
            return "the token is wrong or has expired"
        if self._audiences and not set(self._audiences) & set(status.get("audiences") or ()):
            return "the token is for another audience"
        user = status.get("user", {})
        extra = tuple(sorted((key, tuple(values)) for key, values in (user.get("extra") or {}).items()))
        return User(user.get("username", ""), user.get("uid", ""), tuple(user.get("groups") or ()), extra)

    async def may(self, user: User, access: Access) -> bool:
        """Whether the user may do this. Raises KubeError."""
        allowed = self._rights.get((user, access))
        if allowed is None:
            attributes = {
                "verb": access.verb,
                "namespace": access.namespace,
                "name": access.name,
                "group": access.group,
                "resource": access.resource,
                "subresource": access.subresource,
            }
            spec = {
                "user": user.name,
                "uid": user.uid,
                "groups": list(user.groups),
                "extra": {key: list(values) for key, values in user.extra},
                "resourceAttributes": {key: value for key, value in attributes.items() if value},
            }
            body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
            path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            allowed = bool((await create(self._kube, path, body)).get("status", {}).get("allowed"))
            self._rights.put((user, access), allowed)
        return allowed

    async def require(self, user: User, access: Access) -> None:
        """Check that the user may do this. Raises Forbidden or KubeError."""
        if not await self.may(user, access):
            raise Forbidden(f"user {user.name!r} may not {access}")
