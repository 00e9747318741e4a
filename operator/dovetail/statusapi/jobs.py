"""The answers to the API's questions. Each checks first that the user may ask."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.owners import pod_of
from dovetail.statusapi import view
from dovetail.statusapi.answers import IterationList, Job, JobDetail, JobList, KubeEvent, PodLog, PodLogList
from dovetail.statusapi.api_settings import ApiSettings
from dovetail.statusapi.auth import Access, Auth, Forbidden, Unauthenticated, User, place
from dovetail.statusapi.coordinator_reader import CoordinatorReader
from dovetail.statusapi.fair_room import FairRoom, FairShare
from dovetail.statusapi.followed import Followed, events_of
from dovetail.statusapi.kube import KubeClient, Object, core_path, get, jobs_path, page

KEEP_ALIVE_SECONDS = 15.0
LOG_BYTES = 4 << 20
JOBS_PAGE = 100
# Questions of the run page whose answers hold prompts and responses.
TEXTS = ("sample", "evaluation/")


class NotFound(Exception):
    """There is no such thing. The answer is HTTP 404."""


class Large(NamedTuple):
    """An answer and its memory. The sender gives the memory back."""

    content: bytes
    share: FairShare


class Service:
    """One method for each route. All raise Unauthenticated, Forbidden, NotFound or KubeError. Those of large answers
    and of streams also raise TooMany."""

    def __init__(
        self,
        kube: KubeClient,
        auth: Auth,
        coordinators: CoordinatorReader,
        settings: ApiSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._auth, self._coordinators = kube, auth, coordinators
        self._namespaces, self._poll, self._clock = settings.namespaces, settings.poll_seconds, clock
        self._streams = FairRoom(settings.streams, f"{settings.streams} streams")
        self._answers = FairRoom(settings.answer_bytes, f"{settings.answer_bytes} bytes for large answers")
        self._followed: dict[tuple[str, str], Followed] = {}

    async def ready(self) -> None:
        await get(self._kube, "/version")

    async def jobs(self, header: str | None, namespace: str, limit: int, token: str | None) -> JobList:
        """The jobs of a namespace, or of all if it is empty."""
        await self._allow(header, Access("list", namespace))
        items: list[Job] = []
        while len(items) < limit:
            query = {"continue": token} if token else {}
            found = await page(self._kube, jobs_path(namespace), query, min(JOBS_PAGE, limit - len(items)))
            items += [view.job_line(item) for item in found["items"]]
            token = found.get("metadata", {}).get("continue") or None
            if token is None:
                break
        return JobList(items=items, continue_token=token)

    async def job(self, header: str | None, namespace: str, name: str) -> JobDetail:
        user = await self._allow(header, Access("get", namespace, name))
        job = await self._job(namespace, name)
        return await self._detail(user, job, lambda: events_of(self._kube, job))

    async def iterations(
        self, header: str | None, namespace: str, name: str, stage: str | None, after: int, limit: int
    ) -> IterationList:
        await self._allow(header, Access("get", namespace, name))
        progress = await self._coordinators.progress(await self._job(namespace, name))
        last = min(len(progress.rows), after + limit)
        rows = progress.since(after, stage)
        if last < len(progress.rows):
            kept = {id(row) for row in progress.rows[after:last]}
            rows = [row for row in rows if id(row) in kept]
        return IterationList(items=rows, next=max(after, last), complete=progress.live.reachable)

    async def trace(self, header: str | None, namespace: str, name: str, iteration: int) -> Large:
        user = await self._allow(header, Access("get", namespace, name))
        job = await self._job(namespace, name)
        return await self._large(user, lambda share: self._coordinators.trace(job, iteration, share.take))

    async def page(self, header: str | None, namespace: str, name: str, question: str) -> Large:
        user = await self._allow(header, Access("get", namespace, name))
        if question.startswith(TEXTS):
            # The coordinator's log holds such text, too.
            await self._allow(header, Access("get", namespace, group="", resource="pods", subresource="log"))
        job = await self._job(namespace, name)
        return await self._large(user, lambda share: self._coordinators.page(job, question, share.take))

    async def _large(self, user: User, ask: Callable[[FairShare], Awaitable[bytes]]) -> Large:
        share = self._answers.share(user.tenant)
        try:
            async with share.hold():
                content = await ask(share)
        except BaseException:
            share.leave()
            raise
        share.settle(len(content))
        return Large(content, share)

    async def plan(self, header: str | None, namespace: str, name: str) -> dict[str, Any]:
        await self._allow(header, Access("get", namespace, name))
        job = await self._job(namespace, name)
        try:
            found = await get(self._kube, core_path(namespace, "configmaps", names.plan_config_map(name)))
        except KubeError as error:
            if error.status not in (403, 404):  # 403: the job's Role, which lets the API read it, is not there yet
                raise
            found = {"metadata": {}}
        text = (found.get("data") or {}).get("plan.json")
        if text is None or not view.owned_by(job, found):
            planned = [c.message for c in view.status_of(job).conditions if c.type == "Planned" and c.status != "True"]
            raise NotFound(f"job {name} has no plan yet" + (f": {planned[0]}" if planned and planned[0] else ""))
        return dict(json.loads(text))

    async def logs(self, header: str | None, namespace: str, name: str) -> PodLogList:
        await self._allow(header, Access("get", namespace, name))
        await self._allow(header, Access("list", namespace, group="", resource="pods"))
        uid = (await self._job(namespace, name))["metadata"]["uid"]
        pods = await get(self._kube, core_path(namespace, "pods"), {"labelSelector": f"{names.UID_LABEL}={uid}"})
        base = view.links(namespace, name)["logs"]
        items = [
            PodLog(
                pod=pod["metadata"]["name"],
                group=pod["metadata"].get("labels", {}).get(names.GROUP_LABEL),
                phase=pod.get("status", {}).get("phase", "Unknown"),
                node=pod.get("spec", {}).get("nodeName"),
                log=f"{base}/{pod['metadata']['name']}",
                kubectl=f"kubectl logs -n {namespace} {pod['metadata']['name']}",
            )
            for pod in pods["items"]
            if pod_of(pod, name, uid)
        ]
        return PodLogList(items=sorted(items, key=lambda item: item.pod))

    async def log(self, header: str | None, namespace: str, name: str, pod: str, lines: int, previous: bool) -> Large:
        user = await self._allow(header, Access("get", namespace, name))
        await self._allow(header, Access("get", namespace, pod, group="", resource="pods", subresource="log"))
        path = core_path(namespace, "pods", pod)
        uid = (await self._job(namespace, name))["metadata"]["uid"]
        try:
            found = await get(self._kube, path)
        except KubeError as error:
            raise (NotFound(f"there is no pod {pod}") if error.status == 404 else error) from error
        if not pod_of(found, name, uid):
            raise NotFound(f"pod {pod} is not one of job {name}'s")
        query = {"tailLines": str(lines), "limitBytes": str(LOG_BYTES)} | ({"previous": "true"} if previous else {})

        async def read(share: FairShare) -> bytes:
            share.take(LOG_BYTES)  # the length of the log is unknown
            return await self._kube.request("GET", f"{path}/log", query)

        return await self._large(user, read)

    async def stream(
        self, header: str | None, namespace: str, name: str, after: int
    ) -> tuple[AsyncIterator[str], FairShare]:
        """Server-sent events, with their place among the streams. The sender gives it back. The user's right is checked
        before the first event and before each later one."""
        user = await self._allow(header, Access("get", namespace, name))
        await self._job(namespace, name)
        share = self._streams.share(user.tenant)
        share.take(1)
        return self._stream(header, namespace, name, after), share

    async def _stream(self, header: str | None, namespace: str, name: str, after: int) -> AsyncIterator[str]:
        said, spoke = "", self._clock()
        async with self._follow(namespace, name) as followed:
            while True:
                try:
                    user = await self._allow(header, Access("get", namespace, name))
                    job = await followed.job()
                    detail = await self._detail(user, job, followed.events)
                except (NotFound, Unauthenticated, Forbidden) as error:
                    yield _event("end", json.dumps({"reason": str(error)}))
                    return
                except KubeError as error:
                    if error.status == 404:
                        yield _event("end", json.dumps({"reason": _missing(namespace, name)}))
                        return
                    if self._clock() - spoke >= KEEP_ALIVE_SECONDS:
                        yield f": {' '.join(str(error).split())}\n\n"
                        spoke = self._clock()
                    await asyncio.sleep(self._poll)
                    continue
                over = detail.state in view.TERMINAL
                progress = await self._coordinators.progress(job, now=over)  # the last rows, too
                total = len(progress.rows)
                for number, row in enumerate(progress.rows[after:total], after + 1):
                    yield _event("iteration", row.model_dump_json(by_alias=True), number)
                text = detail.model_dump_json(by_alias=True)
                if text != said:
                    yield _event("status", text)
                if text != said or total > after:
                    spoke = self._clock()
                said, after = text, max(after, total)
                if over:
                    yield _event("end", json.dumps({"reason": detail.state}))
                    return
                if self._clock() - spoke >= KEEP_ALIVE_SECONDS:
                    yield ": still here\n\n"
                    spoke = self._clock()
                await asyncio.sleep(self._poll)

    @asynccontextmanager
    async def _follow(self, namespace: str, name: str) -> AsyncIterator[Followed]:
        key = (namespace, name)
        if key not in self._followed:
            self._followed[key] = Followed(self._kube, namespace, name, self._poll)
        followed = self._followed[key]
        followed.streams += 1
        try:
            yield followed
        finally:
            followed.streams -= 1
            if not followed.streams:
                del self._followed[key]
                await followed.close()

    async def _allow(self, header: str | None, access: Access) -> User:
        user = await self._auth.user(header)
        await self._auth.require(user, access)
        if self._namespaces and access.namespace not in self._namespaces:
            raise NotFound(f"jobs in {place(access.namespace)} are not shown here")
        return user

    async def _job(self, namespace: str, name: str) -> Object:
        try:
            return await get(self._kube, jobs_path(namespace, name))
        except KubeError as error:
            if error.status == 404:
                raise NotFound(_missing(namespace, name)) from error
            raise

    async def _detail(
        self, user: User, job: Object, read_events: Callable[[], Awaitable[list[KubeEvent]]]
    ) -> JobDetail:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        status = view.status_of(job)
        events = None
        if await self._auth.may(user, Access("list", namespace, group="", resource="events")):
            events = await read_events()
        return JobDetail(
            **view.job_line(job).model_dump(),
            status=status,
            conditions=sorted(status.conditions, key=lambda c: c.last_transition_time, reverse=True),
            live=(await self._coordinators.progress(job)).live,
            events=events,
            links=view.links(namespace, name),
        )


def _missing(namespace: str, name: str) -> str:
    return f"there is no RLHFJob {name} in namespace {namespace}"


def _event(kind: str, data: str, number: int | None = None) -> str:
    """One server-sent event. A client sends `number` back as Last-Event-ID."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\ndata: {data}\n\n"
