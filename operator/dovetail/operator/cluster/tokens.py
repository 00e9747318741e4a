"""The tokens of jobs. Each is made once, kept in a Secret, and stays the same while the job lives."""

from __future__ import annotations

import base64
import binascii
import secrets as random

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.resources import SECRET
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.reconcile.children import label
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.secret import secret


class Tokens:
    """The operator may read and create single Secrets but not list them. So it reads a Secret only if it must, and
    remembers the result."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, str] = {}
        self._there: set[str] = set()

    def known(self, uid: str) -> str | None:
        return self._known.get(uid)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)
        self._there.discard(uid)

    def doubt(self, uid: str | None = None) -> None:
        """Read this job's Secret (or all) again at the next `ensure`: it may have been deleted."""
        if uid is None:
            self._there.clear()
        else:
            self._there.discard(uid)

    async def ensure(self, context: RenderContext, *, new: bool = False) -> None:
        """Make sure that the job's Secret exists. A deleted one is created again with the same token if running pods
        may hold it. `new`: the Secret probably does not exist yet. Raises KubeError."""
        if context.uid in self._there:
            return
        name = names.token_secret(context.name)
        found = await self._create(context) if new else None
        if found is None:
            try:
                found = await self._client.get(SECRET, context.namespace, name)
            except KubeError as error:
                if error.status != 404:
                    raise
                found = await self._create(context)
        if found is None:
            raise KubeError(409, f"Secret {name} came and went")
        if label(found, names.UID_LABEL) != context.uid:
            # Of an earlier job with this name, whose children the garbage collector has not got to yet.
            await self._client.delete(SECRET.kind, context.namespace, name, str(found["metadata"]["uid"]))
            raise KubeError(409, f"Secret {name} of an earlier job is still there")
        try:
            self._known[context.uid] = base64.b64decode(found["data"][names.TOKEN_KEY]).decode()
        except (KeyError, ValueError, binascii.Error) as error:
            raise KubeError(422, f"Secret {name} holds no {names.TOKEN_KEY}; delete it and the job's pods") from error
        self._there.add(context.uid)

    async def _create(self, context: RenderContext) -> Object | None:
        """None if there is one of this name."""
        token = self._known.get(context.uid) or random.token_hex(32)
        try:
            return await self._client.create(secret(context, token))
        except KubeError as error:
            if error.status != 409:
                raise
            return None
