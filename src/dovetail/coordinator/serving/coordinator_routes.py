"""The coordinator's HTTP server. It has the routes for trainers, rollouts and scorers, status and metrics. It has no
logic of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

from dovetail.coordinator.reporting.page.page_documents import NotKept
from dovetail.coordinator.serving.served_batches import NotPrepared
from dovetail.coordinator.workers.trainer_group import StaleGeneration, TrainerGroup
from dovetail.protocol.http import serving
from dovetail.protocol.messages import BatchPart, Heartbeat, JoinRequest, NextRequest, Offer, Register
from dovetail.protocol.wire import CONTENT_TYPE, Document, Ranges

M = TypeVar("M", bound=BaseModel)
_OFFSET = re.compile(r"[0-9]{1,15}")
_SECONDS = re.compile(r"[0-9]{1,3}")
LEFT_SECONDS = 0.05
PIECE_BYTES = 2**20


class Host(Protocol):
    """The parts of the coordinator that the server needs."""

    trainers: TrainerGroup

    def register(self, message: Register) -> None: ...
    def retire(self, name: str, host: str | None = None) -> None: ...
    def left(self, name: str) -> bool: ...
    def offer(self, message: Offer) -> None: ...
    async def batch(self, key: str) -> bytes | Path: ...
    def status(self) -> dict[str, Any]: ...
    def history_since(self, offset: int) -> dict[str, Any]: ...
    def trace(self, iteration: int) -> bytes: ...


# It answers a question of the run page with JSON, and raises NotKept. It is called in a thread.
Page = Callable[[str], bytes]


async def _read(request: web.Request, model: type[M]) -> M:
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        raise web.HTTPBadRequest(text=f"{model.__name__}: {error}") from error


def _reply(message: BaseModel) -> web.Response:
    return web.Response(text=message.model_dump_json(), content_type="application/json")


async def _send(request: web.Request, response: web.StreamResponse, document: Document, ranges: Ranges) -> None:
    """Send these ranges. The kernel sends long ranges of a file, so they are never in this process's memory. Others are
    sent in pieces, because the event loop would be blocked while it hands hundreds of megabytes to a connection."""
    loop, short, size = asyncio.get_running_loop(), Ranges(), 0
    file = document.source.open("rb") if isinstance(document.source, Path) else None
    try:
        for offset, count in [*ranges, (0, 0)]:
            if short and (size >= PIECE_BYTES or count >= PIECE_BYTES or not count):
                await response.write(await asyncio.to_thread(document.read, short))
                short, size = Ranges(), 0
            if count < PIECE_BYTES:
                short.append((offset, count))
                size += count
            elif file is None:
                for start in range(offset, offset + count, PIECE_BYTES):
                    await response.write(document.read([(start, min(PIECE_BYTES, offset + count - start))]))
            elif request.transport is None:
                raise ConnectionResetError("the rank is gone")
            else:
                await loop.sendfile(request.transport, file, offset, count)
    finally:
        if file is not None:
            file.close()


class _Routes:
    """The answers to requests. The page's questions are answered one at a time, so that many viewers do not take the
    threads and the memory that the run needs."""

    def __init__(self, host: Host, page: Page | None) -> None:
        self._host, self._page, self._one_page = host, page, asyncio.Lock()

    async def join(self, request: web.Request) -> web.Response:
        message = await _read(request, JoinRequest)
        try:
            return _reply(await self._host.trainers.join(message))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    async def next_command(self, request: web.Request) -> web.Response:
        message = await _read(request, NextRequest)
        try:
            return _reply(await self._host.trainers.next(message))
        except StaleGeneration as error:
            raise web.HTTPConflict(text=str(error)) from error

    async def heartbeat(self, request: web.Request) -> web.Response:
        return _reply(self._host.trainers.heartbeat(await _read(request, Heartbeat)))

    async def batch(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        wanted = await _read(request, BatchPart) if request.method == "POST" else None
        try:
            document = Document(await self._host.batch(key))
            head, ranges = b"", [(0, document.size)]
            if wanted is not None:
                head, ranges = await asyncio.to_thread(document.part, wanted)
        except (LookupError, FileNotFoundError) as error:
            raise web.HTTPNotFound(text=f"no batch {key}: {error}") from error
        except ValueError as error:
            raise web.HTTPConflict(text=str(error)) from error
        except NotPrepared as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        size = len(head) + sum(count for _, count in ranges)
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE, "Content-Length": str(size)})
        await response.prepare(request)
        await response.write(head)
        await _send(request, response, document, ranges)
        await response.write_eof()
        return response

    async def offer(self, request: web.Request) -> web.Response:
        self._host.offer(await _read(request, Offer))
        return web.json_response({})

    async def instances(self, request: web.Request) -> web.Response:
        self._host.register(await _read(request, Register))
        return web.json_response({})

    async def retire(self, request: web.Request) -> web.Response:
        name, wait = request.match_info["name"], request.query.get("wait", "0")
        if not _SECONDS.fullmatch(wait):
            raise web.HTTPBadRequest(text=f"wait must be a whole number of seconds, at most 999; it is {wait[:64]!r}")
        self._host.retire(name, request.query.get("host"))
        for _ in range(round(int(wait) / LEFT_SECONDS)):
            if self._host.left(name):
                break
            await asyncio.sleep(LEFT_SECONDS)
        return web.json_response({"left": self._host.left(name)})

    async def status(self, _: web.Request) -> web.Response:
        return web.json_response(self._host.status())

    async def history(self, request: web.Request) -> web.Response:
        offset = request.query.get("offset", "0")
        if not _OFFSET.fullmatch(offset):
            raise web.HTTPBadRequest(text=f"offset must be a whole number of at least 0; it is {offset[:64]!r}")
        return web.json_response(self._host.history_since(int(offset)))

    async def trace(self, request: web.Request) -> web.Response:
        iteration = int(request.match_info["iteration"])
        try:
            return web.Response(body=self._host.trace(iteration), content_type="application/json")
        except FileNotFoundError as error:
            raise web.HTTPNotFound(text=f"no trace of iteration {iteration}") from error

    async def page_document(self, request: web.Request) -> web.Response:
        if self._page is None:
            raise web.HTTPNotFound(text="this host has no run page")
        try:
            async with self._one_page:
                body = await asyncio.to_thread(self._page, request.match_info["question"])
        except NotKept as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.Response(body=body, content_type="application/json")


def make_app(host: Host, token: str, registry: CollectorRegistry, page: Page | None = None) -> web.Application:
    """The routes of docs/architecture.md. All routes except /metrics and /healthz require the job's token. `page` is
    None for hosts without a run's folder."""
    routes = _Routes(host, page)

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await serving.admit(request, token)
        return await handler(request)

    app = web.Application(middlewares=[authenticate], client_max_size=256 * 1024 * 1024)
    app.add_routes(
        [
            web.post("/v1/trainer/join", routes.join),
            web.post("/v1/trainer/next", routes.next_command),
            web.post("/v1/heartbeat", routes.heartbeat),
            web.get("/v1/batches/{key:.+}", routes.batch),
            web.post("/v1/batches/{key:.+}", routes.batch),
            web.post("/v1/weights/offer", routes.offer),
            web.post("/v1/instances", routes.instances),
            web.delete("/v1/instances/{name}", routes.retire),
            web.get("/v1/status", routes.status),
            web.get("/v1/history", routes.history),
            web.get("/v1/traces/{iteration:[0-9]{1,9}}", routes.trace),
            web.get("/v1/page/{question:.+}", routes.page_document),
            web.get("/metrics", serving.metrics(registry)),
            web.get("/healthz", serving.healthz),
        ]
    )
    return app
