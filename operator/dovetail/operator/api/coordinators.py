"""What coordinators say of their jobs, read over HTTP with each job's own token and remembered."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from dovetail.operator import names
from dovetail.operator.api import view
from dovetail.operator.api.kube import Kube, Object, core_path, get
from dovetail.operator.api.models import Iteration, Live
from dovetail.operator.client import KubeError
from dovetail.operator.history import ITERATIONS_KEY

# A coordinator that is gone is answered for from memory, of which a row takes up to 3 KB.
REMEMBERED_JOBS, REMEMBERED_ROWS = 500, 50_000
ANSWER_BYTES = 8 << 20
PAGES = 64  # of history, in one go


class Unreachable(Exception):
    """The coordinator cannot be asked; the message says why."""


class Progress:
    """One job's: `rows` in the order in which they came, replayed steps again; `offset` is the coordinator's."""

    def __init__(self) -> None:
        self.rows: list[Iteration] = []
        self.live = Live(reachable=False, message="not asked yet")
        self.offset = 0
        self.asked = float("-inf")
        self.lock = asyncio.Lock()

    def since(self, after: int, stage: str | None = None) -> list[Iteration]:
        """The rows from number `after` on, each step once."""
        found: dict[tuple[str, int], Iteration] = {}
        for row in self.rows[after:]:
            if stage is None or row.stage == stage:
                found.pop((row.stage, row.step), None)
                found[row.stage, row.step] = row
        return list(found.values())


class Coordinators:
    """`seconds`: how old an answer may be; requests in between share it."""

    def __init__(
        self,
        kube: Kube,
        session: aiohttp.ClientSession,
        url: Callable[[str, str], str],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._session, self._url = kube, session, url
        self._seconds, self._clock = seconds, clock
        self._jobs: OrderedDict[str, Progress] = OrderedDict()

    async def progress(self, job: Object, *, now: bool = False) -> Progress:
        """Of an RLHFJob; what was known before where the coordinator cannot be asked. `now`: ask whatever the age of
        the last answer."""
        uid = job["metadata"]["uid"]
        found = self._jobs.setdefault(uid, Progress())
        self._jobs.move_to_end(uid)
        async with found.lock:
            if now or self._clock() - found.asked >= self._seconds:
                try:
                    await self._ask(job, found)
                except (Unreachable, KubeError) as error:
                    found.live = Live(reachable=False, message=str(error), status=found.live.status)
                    if not found.rows and view.state_of(view.status_of(job)) in view.TERMINAL:
                        found.rows = await self._kept(job)
                found.asked = self._clock()
        self._forget()
        return found

    def _forget(self) -> None:
        """The jobs that nobody asked about for longest, where there are too many, or too many rows in all."""
        rows = sum(len(progress.rows) for progress in self._jobs.values())
        while len(self._jobs) > 1 and (len(self._jobs) > REMEMBERED_JOBS or rows > REMEMBERED_ROWS):
            rows -= len(self._jobs.popitem(last=False)[1].rows)

    async def trace(self, job: Object, iteration: int) -> bytes:
        """The iteration's timeline in Chrome's trace format. Raises Unreachable or KubeError."""
        return await self._fetch(job, await self._token(job), f"/v1/traces/{iteration}")

    async def _ask(self, job: Object, found: Progress) -> None:
        token = await self._token(job)
        status = _document(await self._fetch(job, token, "/v1/status"))
        for _ in range(PAGES):
            page = _document(await self._fetch(job, token, f"/v1/history?offset={found.offset}"))
            rows = [row for item in page.get("rows", ()) if (row := _row(item)) is not None]
            offset = page.get("offset")
            if not isinstance(offset, int) or offset <= found.offset:
                break
            found.rows += rows
            found.offset = offset
        found.live = Live(reachable=True, status=status)

    async def _kept(self, job: Object) -> list[Iteration]:
        """What the operator kept of a job that is over."""
        namespace, name = job["metadata"]["namespace"], names.history_config_map(job["metadata"]["name"])
        try:
            found = await get(self._kube, core_path(namespace, "configmaps", name))
            rows = json.loads(found["data"][ITERATIONS_KEY]) if view.owned_by(job, found) else []
        except (KubeError, KeyError, TypeError, ValueError):
            return []
        return [row for item in rows if (row := _row(item)) is not None]

    async def _token(self, job: Object) -> str:
        name = names.token_secret(job["metadata"]["name"])
        try:
            secret = await get(self._kube, core_path(job["metadata"]["namespace"], "secrets", name))
        except KubeError as error:
            if error.status == 404:
                raise Unreachable("the job has not started yet") from error
            raise
        if not view.owned_by(job, secret):
            raise Unreachable(f"the Secret {name} is not this job's")
        try:
            return base64.b64decode(secret["data"][names.TOKEN_KEY], validate=True).decode()
        except (KeyError, TypeError, binascii.Error, UnicodeDecodeError) as error:
            raise Unreachable(f"the Secret {name} holds no token") from error

    async def _fetch(self, job: Object, token: str, path: str) -> bytes:
        url = self._url(job["metadata"]["name"], job["metadata"]["namespace"]) + path
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as reply:
                content = bytearray()
                async for chunk in reply.content.iter_chunked(1 << 16):
                    content += chunk
                    if len(content) > ANSWER_BYTES:
                        raise Unreachable("the coordinator's answer is too long")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"the coordinator does not answer: {error or type(error).__name__}") from error
        if reply.status != 200:
            said = bytes(content[:200]).decode(errors="replace").strip()
            raise Unreachable(f"the coordinator answers {reply.status}: {said}")
        return bytes(content)


def _document(content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise Unreachable("the coordinator's answer is no JSON") from error
    if not isinstance(document, dict):
        raise Unreachable("the coordinator's answer is no JSON object")
    return document


def _row(item: Any) -> Iteration | None:
    """A row of history.jsonl; None for what is none."""
    try:
        metrics = {sys.intern(key): float(value) for key, value in item["metrics"].items()}
        time = datetime.fromtimestamp(item["time"], UTC)
        return Iteration(stage=str(item["stage"]), step=int(item["step"]), time=time, metrics=metrics)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):
        return None
