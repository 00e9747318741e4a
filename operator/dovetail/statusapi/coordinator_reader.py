"""The progress of jobs. It is read from coordinators over HTTP with each job's own token, and remembered."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from dovetail.kube import coordinator_http, names
from dovetail.kube.connection import KubeError
from dovetail.protocol.files.run_rows import ROW_STAGES
from dovetail.statusapi import view
from dovetail.statusapi.answers import Iteration, Live
from dovetail.statusapi.kube import KubeClient, Object, core_path, get

# If a coordinator is gone, the answers come from memory. A row takes up to 3 KB there.
REMEMBERED_JOBS, REMEMBERED_ROWS = 500, 50_000
# The bytes of rows, as they came, of all jobs and of one job. In memory rows take about five times as much.
REMEMBERED_BYTES, JOB_BYTES = 64 << 20, 32 << 20
STATUS_BYTES, STATUS_VALUES = 1 << 20, 20_000
PAGES = 64  # of history, in one turn
ROW_METRICS, METRIC_CHARACTERS = 200, 100

Unreachable = coordinator_http.NoAnswer


class JobProgress:
    """The progress of one job. `rows` are in the order in which they came. A replayed step is there again. The
    coordinator's next rows begin at `offset`. `size` is the number of bytes of the answers so far."""

    def __init__(self) -> None:
        self.rows: list[Iteration] = []
        self.size = self.status_size = 0
        self.live = Live(reachable=False, message="not asked yet")
        self.offset = 0
        self.asked = float("-inf")
        self.lock = asyncio.Lock()

    def since(self, after: int, stage: str | None = None) -> list[Iteration]:
        """The rows from number `after` on, each step once."""
        newest: dict[tuple[str, int], Iteration] = {}
        for row in self.rows[after:]:
            if stage is None or row.stage == stage:
                newest.pop((row.stage, row.step), None)
                newest[row.stage, row.step] = row
        return list(newest.values())


class CoordinatorReader:
    """Reads progress from coordinators. `url` returns the URL of a job's coordinator, and raises NoAnswer or KubeError.
    An answer may be `seconds` old, and requests within that time share it. `answer_seconds` is its time limit."""

    def __init__(
        self,
        kube: KubeClient,
        session: aiohttp.ClientSession,
        url: Callable[[Object], Awaitable[str]],
        seconds: float,
        clock: Callable[[], float],
        answer_seconds: float = 10.0,
    ) -> None:
        self._kube, self._session, self._url = kube, session, url
        self._seconds, self._clock, self._answer_seconds = seconds, clock, answer_seconds
        self._jobs: OrderedDict[str, JobProgress] = OrderedDict()

    async def progress(self, job: Object, *, now: bool = False) -> JobProgress:
        """The progress of an RLHFJob. If the coordinator cannot be asked, it is the progress that was known before.
        With `now`, it is asked even if the last answer is recent."""
        uid = job["metadata"]["uid"]
        progress = self._jobs.setdefault(uid, JobProgress())
        self._jobs.move_to_end(uid)
        async with progress.lock:
            if now or self._clock() - progress.asked >= self._seconds:
                try:
                    await self._ask(job, progress)
                except (Unreachable, KubeError) as error:
                    progress.live = Live(reachable=False, message=str(error), status=progress.live.status)
                    if not progress.rows and view.state_of(view.status_of(job)) in view.TERMINAL:
                        progress.rows = await self._kept(job)
                progress.asked = self._clock()
        self._forget()
        return progress

    def _forget(self) -> None:
        """Forget the jobs that nobody asked about for longest, if there are too many jobs or rows."""
        rows = sum(len(progress.rows) for progress in self._jobs.values())
        size = sum(progress.size for progress in self._jobs.values())
        while len(self._jobs) > 1 and (
            len(self._jobs) > REMEMBERED_JOBS or rows > REMEMBERED_ROWS or size > REMEMBERED_BYTES
        ):
            _, gone = self._jobs.popitem(last=False)
            rows, size = rows - len(gone.rows), size - gone.size

    async def trace(self, job: Object, iteration: int, take: Callable[[int], None]) -> bytes:
        """The iteration's timeline in Chrome's trace format. `take` gets the numbers of its bytes as they come. Raises
        Unreachable or KubeError, and what `take` raises."""
        return await self._large(job, f"/v1/traces/{iteration}", take)

    async def page(self, job: Object, question: str, take: Callable[[int], None]) -> bytes:
        """The coordinator's answer to one of the run page's questions (`protocol.files.run_rows`). `take` and the
        errors are those of `trace`."""
        return await self._large(job, f"/v1/page/{question}", take)

    async def _large(self, job: Object, path: str, take: Callable[[int], None]) -> bytes:
        token, url = await self._token(job), await self._url(job) + path
        limits: dict[str, Any] = {"seconds": self._answer_seconds, "most": coordinator_http.TRACE_BYTES}
        return await coordinator_http.fetch(self._session, url, token, take=take, **limits)

    async def _ask(self, job: Object, progress: JobProgress) -> None:
        token, url = await self._token(job), await self._url(job)
        content = await self._fetch(f"{url}/v1/status", token, STATUS_BYTES)
        status = coordinator_http.document(content, STATUS_VALUES)
        progress.size += len(content) - progress.status_size
        progress.status_size = len(content)
        progress.live = Live(reachable=True, status=status)
        try:
            async with asyncio.timeout(self._answer_seconds):
                await self._rows(url, token, progress)
        except TimeoutError as error:
            raise Unreachable(f"the coordinator's history did not come within {self._answer_seconds:g} s") from error

    async def _rows(self, url: str, token: str, progress: JobProgress) -> None:
        for _ in range(PAGES):
            path = f"/v1/history?offset={progress.offset}"
            content = await self._fetch(url + path, token, coordinator_http.DOCUMENT_BYTES)
            page = coordinator_http.document(content)
            items, offset = page.get("rows"), page.get("offset")
            if not isinstance(items, list) or not isinstance(offset, int) or offset <= progress.offset:
                return
            if progress.size + len(content) > JOB_BYTES or len(progress.rows) + len(items) > REMEMBERED_ROWS:
                raise Unreachable("the coordinator's history is too long; the volume's history.jsonl has all of it")
            progress.rows += [row for item in items if (row := _row(item)) is not None]
            progress.size += len(content)
            progress.offset = offset

    async def _kept(self, job: Object) -> list[Iteration]:
        """The rows that the operator kept of a job that is over."""
        namespace, name = job["metadata"]["namespace"], names.history_config_map(job["metadata"]["name"])
        try:
            config_map = await get(self._kube, core_path(namespace, "configmaps", name))
            rows = json.loads(config_map["data"][names.ITERATIONS_KEY]) if view.owned_by(job, config_map) else []
        except (KubeError, KeyError, TypeError, ValueError):
            return []
        return [row for item in rows if (row := _row(item)) is not None]

    async def _token(self, job: Object) -> str:
        name = names.token_secret(job["metadata"]["name"])
        try:
            secret = await get(self._kube, core_path(job["metadata"]["namespace"], "secrets", name))
        except KubeError as error:
            if error.status in (403, 404):  # 403: the job's Role, which lets the API read it, is not there yet
                raise Unreachable("the job has not started yet") from error
            raise
        if not view.owned_by(job, secret):
            raise Unreachable(f"the Secret {name} is not this job's")
        try:
            return base64.b64decode(secret["data"][names.TOKEN_KEY], validate=True).decode()
        except (KeyError, TypeError, binascii.Error, UnicodeDecodeError) as error:
            raise Unreachable(f"the Secret {name} holds no token") from error

    async def _fetch(self, url: str, token: str, most: int) -> bytes:
        return await coordinator_http.fetch(self._session, url, token, seconds=self._answer_seconds, most=most)


def _row(item: Any) -> Iteration | None:
    """A row of history.jsonl. None if `item` is not one."""
    try:
        metrics = {
            sys.intern(key): float(value)
            for key, value in item["metrics"].items()
            if len(key) <= METRIC_CHARACTERS and value is not None
        }
        time = datetime.fromtimestamp(item["time"], UTC)
        stage, step = str(item["stage"]), int(item["step"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):
        return None
    if stage not in ROW_STAGES or len(metrics) > ROW_METRICS or not 0 <= step < 2**53:
        return None
    return Iteration(stage=stage, step=step, time=time, metrics=metrics)
