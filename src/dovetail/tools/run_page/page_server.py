"""Serves the run page of a folder of runs over HTTP, to browsers that bring a token. Says which runs are at work."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from dovetail.coordinator.reporting.page.page_documents import NotKept, PageDocuments, encode
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.sample_files import regular
from dovetail.launch.local.status_poll import fetch_status
from dovetail.protocol.errors import RunError
from dovetail.protocol.http import serving
from dovetail.protocol.http.serving import Handler
from dovetail.web.page_files import HEADERS, INDEX, PageFile, page_files

# A run directory has one of these.
SIGNS = ("job.json", "history.jsonl")


def at_work(run_dir: Path) -> bool | None:
    """Whether a coordinator holds the lock of the run's store. None if that cannot be known. Takes no lock itself."""
    try:
        file = os.open(run_dir / "store.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # The fields of struct flock are type, whence, start, length and pid.
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)
    except (OSError, struct.error):
        return None
    finally:
        os.close(file)


def begins(run_dir: Path) -> bool:
    """Whether the launcher has written the run's files, but its coordinator has not opened the store yet."""
    return not (run_dir / "store.lock").exists() and not (run_dir / "summary.json").exists()


class RunList:
    """The runs below `folder`, or the one run that `folder` is. Runs that appear later are found too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._known: dict[str, PageDocuments] = {}

    def runs(self) -> dict[str, PageDocuments]:
        """The runs by the name of their folder."""
        found = {}
        for path in self._folders():
            if path.name not in self._known:
                self._known[path.name] = PageDocuments(RunFolder(path))
            found[path.name] = self._known[path.name]
        return found

    def get(self, name: str) -> PageDocuments | None:
        """The run with this name, if there is one. The name is only compared. It never becomes part of a path."""
        return self.runs().get(name)

    def alive(self, run: PageDocuments) -> bool | None:
        path = run.folder.path
        return None if begins(path) else at_work(path)

    def _folders(self) -> list[Path]:
        if _is_run(self.folder):
            return [self.folder]
        try:
            return sorted(path for path in self.folder.iterdir() if path.is_dir() and _is_run(path))
        except OSError:
            return []


def _is_run(path: Path) -> bool:
    """Whether a folder is a run. False for a folder that this user may not read, where Path.is_file would raise
    PermissionError."""
    return any(os.path.isfile(path / name) for name in SIGNS)


HOST = "127.0.0.1"
STATUS_SECONDS = 1.0
# The fields of a status document that the page shows.
SHOWN = (
    *("stage", "phase", "step", "total_steps", "iteration", "total_iterations", "samples_done", "samples_total"),
    *("message", "seconds_left", "stage_seconds_left", "weight_version", "instances"),
)


def coordinator_port(events: Sequence[Mapping[str, Any]]) -> int | None:
    """The port of the run's last coordinator, from the run's events. None if the coordinator is not on this machine's
    loopback, because the run's token must not be sent elsewhere."""
    ready = [event for event in events if event.get("event") == "coordinator.ready"]
    if not ready or ready[-1].get("host") != HOST or not isinstance(ready[-1].get("port"), int):
        return None
    return int(ready[-1]["port"])


def live_status(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The fields SHOWN of the coordinator's status. None if it does not answer."""
    port = coordinator_port(events)
    try:
        with open(run_dir / "token", encoding="utf-8", opener=regular) as file:
            token = file.read().strip()
    except (OSError, ValueError):
        return None
    if port is None or not token.isalnum():
        return None
    found = fetch_status(f"http://{HOST}:{port}", token, STATUS_SECONDS)
    return None if found is None else {name: found[name] for name in SHOWN if name in found}


LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# The seconds between two looks at the files for an open page, and between two signs of life of a quiet stream.
LOOK_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
RunHandler = Callable[[web.Request, PageDocuments], Awaitable[web.StreamResponse]]


def make_page_app(runs: RunList, about: dict[str, Any], token: str, *, any_host: bool = False) -> web.Application:
    """Make the web application. `about`: what the page shows about this server. Every request must bring `token`: as
    `?token=`, for which a browser gets a cookie, as that cookie, or as a bearer token. Unless `any_host` is true, a
    request must also use a loopback name of this machine. Otherwise a page of another site could read the
    runs through a name that resolves to this machine."""
    # Servers on other ports of this machine share the browser's cookies.
    cookie = f"dovetail-ui-{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not any_host and request.host.rpartition(":")[0] not in LOOPBACK and request.host not in LOOPBACK:
            return web.json_response({"detail": "this address is not served; use 127.0.0.1"}, status=403)
        given = request.query.get("token")
        if not any(
            serving.authorized(f"Bearer {found}", token) for found in (given, request.cookies.get(cookie)) if found
        ) and not serving.authorized(request.headers.get("Authorization"), token):
            detail = "open the whole address that `dovetail ui` printed; it ends with a token"
            return web.json_response({"detail": detail}, status=401, headers=HEADERS)
        try:
            reply = await handler(request)
            if given and request.path == "/":
                # The address in the browser, and in its history, then has no token.
                reply = web.Response(status=303, headers={"Location": "/"})
                reply.set_cookie(cookie, token, httponly=True, samesite="Lax")
        except web.HTTPException as error:
            reply = web.json_response({"detail": error.reason}, status=error.status)
        if not reply.prepared:
            reply.headers.update(HEADERS)
        return reply

    async def index(_: web.Request) -> web.Response:
        return _file(page_files()[INDEX])

    async def static(request: web.Request) -> web.Response:
        found = page_files().get(request.match_info["name"])
        return _problem(404, "there is no such file") if found is None else _file(found)

    async def describe(_: web.Request) -> web.Response:
        return _json(encode(about))

    async def listed(_: web.Request) -> web.Response:
        def lines() -> list[dict[str, Any]]:
            now = time.time()
            return [line(name, run, now) for name, run in runs.runs().items()]

        def line(name: str, run: PageDocuments, now: float) -> dict[str, Any]:
            try:
                return run.line(now, runs.alive(run))
            except Exception:  # files that are not a run's must not hide the other runs
                return {"id": name, "name": name, "state": "unreadable"}

        return _json(encode({"runs": await asyncio.to_thread(lines)}))

    def of_run(handler: RunHandler) -> Handler:
        """Calls `handler` with the run that the path names."""

        async def found(request: web.Request) -> web.StreamResponse:
            run = runs.get(request.match_info["run"])
            if run is None:
                return _problem(404, f"there is no run of this name in {runs.folder}")
            return await handler(request, run)

        return found

    async def document(request: web.Request, run: PageDocuments) -> web.Response:
        try:
            question = request.match_info["question"]
            return _json(await asyncio.to_thread(lambda: run.answer(question, time.time(), runs.alive(run))))
        except NotKept as error:
            return _problem(404, str(error))
        except Exception as error:
            return _problem(500, f"the files of this run cannot be read: {type(error).__name__}: {error}")

    async def live(_: web.Request, run: PageDocuments) -> web.Response:
        def status() -> dict[str, Any] | None:
            return live_status(run.folder.path, run.folder.events()) if runs.alive(run) else None

        return _json(encode({"status": await asyncio.to_thread(status)}))

    async def changes(request: web.Request) -> web.StreamResponse:
        def stamp() -> Any:
            return {name: run.folder.sizes() | {"alive": runs.alive(run)} for name, run in runs.runs().items()}

        return await _stream(request, stamp)

    async def run_changes(request: web.Request, run: PageDocuments) -> web.StreamResponse:
        return await _stream(request, lambda: run.folder.stamp() | {"alive": runs.alive(run)})

    app = web.Application(middlewares=[guarded])
    app.add_routes(
        [
            web.get("/", index),
            web.get("/static/{name}", static),
            web.get("/api/v1/about", describe),
            web.get("/api/v1/runs", listed),
            web.get("/api/v1/changes", changes),
            web.get("/api/v1/runs/{run}/changes", of_run(run_changes)),
            web.get("/api/v1/runs/{run}/live", of_run(live)),
            web.get("/api/v1/runs/{run}/{question:.+}", of_run(document)),
        ]
    )
    return app


async def _stream(request: web.Request, stamp: Callable[[], Any]) -> web.StreamResponse:
    """Send server-sent events. The event `changed` comes at the beginning and whenever files change. Its data is what
    `stamp` returns."""
    reply = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    said, spoke = "", 0.0
    with contextlib.suppress(ConnectionError):  # the browser has gone
        await reply.prepare(request)
        while True:
            text = json.dumps(await asyncio.to_thread(stamp))
            if text != said:
                await reply.write(f"event: changed\ndata: {text}\n\n".encode())
                said, spoke = text, time.monotonic()
            elif time.monotonic() - spoke > KEEP_ALIVE_SECONDS:
                await reply.write(b": still here\n\n")
                spoke = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
    return reply


def _file(found: PageFile) -> web.Response:
    return web.Response(body=found.content, content_type=found.kind, charset="utf-8")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _problem(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)


@asynccontextmanager
async def page_server(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve while the context is open. Yields the port. Raises RunError if the address is not available."""
    try:
        runner = await serving.listen(app, host, port)
    except OSError as error:
        raise RunError(f"cannot listen on {host}, port {port}: {error.strerror}; give another --port") from error
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
