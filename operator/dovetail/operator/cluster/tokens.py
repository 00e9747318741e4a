"""The tokens of jobs. A job's token follows from the operator's key and the job's uid, so nobody else can make it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets as random

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.owners import controlled_by
from dovetail.kube.resources import SECRET
from dovetail.operator.cluster import own_objects
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.cluster.own_objects import NameTaken
from dovetail.operator.reconcile.refusals import forged
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.objects import secret

KEY_SECRET = "dovetail-operator-key"
KEY = "key"


class Tokens:
    """The Secrets with the jobs' tokens. The operator may read and create single Secrets, but not list, change or
    delete them. So it reads a Secret only if it must, and remembers the result. `home` is the operator's namespace,
    which has the Secret with the key."""

    def __init__(self, client: Client, home: str) -> None:
        self._client = client
        self._home = home
        self._key: bytes | None = None
        self._known: dict[str, str] = {}
        self._there: set[str] = set()

    def known(self, uid: str) -> str | None:
        return self._known.get(uid)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)
        self._there.discard(uid)

    def doubt(self, uid: str | None = None) -> None:
        """Read this job's Secret (or all) again at the next `ensure`, because it may have been deleted."""
        if uid is None:
            self._there.clear()
        else:
            self._there.discard(uid)

    async def ensure(self, context: RenderContext, *, started: bool) -> None:
        """Make sure that the job's Secret exists. `started` says that the job has a JobSet, or had one before it was
        suspended or failed. Then an operator has made the token in the Secret, and the pods may hold it, even if the
        key was lost since. Raises NameTaken and KubeError."""
        if context.uid in self._there:
            return
        token = hmac.digest(await self._the_key(), context.uid.encode(), hashlib.sha256).hex()
        wanted = secret(context, token)
        found = await self._read(context) if started else None
        if found is None:
            found = await own_objects.create(self._client, wanted, context)
        elif not controlled_by(found, context.uid):
            raise own_objects.not_ours(found, SECRET.kind, context)
        name = names.token_secret(context.name)
        try:
            there = base64.b64decode(found["data"][names.TOKEN_KEY]).decode()
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise NameTaken(forged(name), leaving=False) from error
        # An operator with another key may have made it. But before the job starts, anybody may have made it.
        if not started and not hmac.compare_digest(there.encode(), token.encode()):
            raise NameTaken(forged(name), leaving=False)
        self._known[context.uid] = there
        self._there.add(context.uid)

    async def _read(self, context: RenderContext) -> Object | None:
        return await self._client.find(SECRET.kind, context.namespace, names.token_secret(context.name))

    async def _the_key(self) -> bytes:
        """The key, which is 32 random bytes. The first operator that needs the key makes it."""
        if self._key is None:
            found = await self._client.find(SECRET.kind, self._home, KEY_SECRET)
            if found is None:
                try:
                    found = await self._client.create(_key_secret(self._home))
                except KubeError as error:
                    if error.status != 409:
                        raise
                    raise KubeError(0, f"another operator made Secret {KEY_SECRET} just now") from error
            key = base64.b64decode((found.get("data") or {}).get(KEY) or "")
            if len(key) < 32:
                raise KubeError(0, f"Secret {KEY_SECRET} in namespace {self._home} holds no {KEY}; delete the Secret")
            self._key = key
        return self._key


def _key_secret(namespace: str) -> Object:
    return {
        **SECRET.type_meta,
        "metadata": {
            "name": KEY_SECRET,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": names.FIELD_MANAGER},
        },
        "type": "Opaque",
        "immutable": True,
        "data": {KEY: base64.b64encode(random.token_bytes(32)).decode()},
    }
