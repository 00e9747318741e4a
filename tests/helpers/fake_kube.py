"""The few routes of the Kubernetes API that the status API uses, over real HTTP, with objects that the test puts in.
tests/cluster has the same questions answered by a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from dovetail.protocol.process.endings import cancel
from helpers.patience import PATIENCE

Object = dict[str, Any]
VERSION = {"resourceVersion": "1"}


class ServerThread:
    """An aiohttp application in a thread of its own, on a free port of 127.0.0.1."""

    def __init__(self, app: web.Application) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = self.runner(app)
        self.port: int = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(PATIENCE)

    def runner(self, app: web.Application) -> web.AppRunner:
        return web.AppRunner(app, shutdown_timeout=0.1)

    async def _start(self) -> int:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _end(self) -> None:
        """End the handlers, too: one that a closed loop still has is told of when its memory is freed, in whatever test
        that is."""
        await self._runner.cleanup()
        await cancel(asyncio.all_tasks() - {asyncio.current_task()})

    def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


def _parents(path: str) -> tuple[str, str]:
    """Of an object: its namespace's list and that of all namespaces."""
    parent = path.rpartition("/")[0]
    return parent, re.sub("/namespaces/[^/]+", "", parent)


class FakeKube:
    """`objects` maps paths to objects (or a pod's log, as text); `users` tokens to user names; `rights` holds
    (user, verb, resource[/subresource]); `asked` counts requests by path. RLHFJobs can be made, patched and deleted."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.users: dict[str, str] = {}
        self.rights: set[tuple[str, str, str]] = set()
        self.asked: dict[str, int] = {}
        self.reviews: list[Object] = []
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = ServerThread(app)

    @property
    def url(self) -> str:
        return self._server.url

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig for this server."""
        path = folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": self._server.url}}],
                    "users": [{"name": "u", "user": {"token": "the-api-itself"}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path

    def close(self) -> None:
        self._server.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked[path] = self.asked.get(path, 0) + 1
        if request.headers.get("Authorization") != "Bearer the-api-itself":
            return self._failure(401, "Unauthorized")
        if "/rlhfjobs" in path and request.method != "GET":
            return await self._change(request)
        if request.method == "POST":
            return web.json_response(self._review(path, await request.json()))
        if path == "/version":
            return web.json_response({"gitVersion": "v1.36.3"})
        if "watch" in request.query:
            return await self._watch(request)
        found = self.objects.get(path)
        if isinstance(found, int):
            return self._failure(found, "as the test wants it")
        if isinstance(found, str):
            return web.Response(text=found)
        if found is None:
            items = list(self._listed(request).values())
            if not items and not path.endswith(("rlhfjobs", "pods", "events")):
                return self._failure(404, f"{path} not found")
            start = int(request.query.get("continue", "0"))
            limit = int(request.query.get("limit", "500"))
            rest = str(start + limit) if start + limit < len(items) else None
            return web.json_response({"items": items[start : start + limit], "metadata": {"continue": rest} | VERSION})
        if "metadata" in found:
            found = found | {"metadata": found["metadata"] | VERSION}
        return web.json_response(found)

    def _listed(self, request: web.Request) -> dict[str, Object]:
        return {
            path: thing
            for path, thing in sorted(self.objects.items())
            if request.path in _parents(path) and isinstance(thing, dict) and self._selected(request, thing)
        }

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """First what is there, and then each change, until the reader leaves."""
        response = web.StreamResponse()
        await response.prepare(request)
        told: dict[str, Object] = {}
        while True:
            there = self._listed(request)
            changes = [("MODIFIED", thing) for path, thing in there.items() if told.get(path) is not thing]
            changes += [("DELETED", thing) for path, thing in told.items() if path not in there]
            for kind, thing in changes:
                await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")
            told = there
            await asyncio.sleep(0.01)

    async def _change(self, request: web.Request) -> web.Response:
        """Make, patch or delete a job, as an API server does."""
        path, body = request.path, await request.json() if request.can_read_body else {}
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return self._failure(409, f'rlhfjobs.dovetail.dev "{body["metadata"]["name"]}" already exists')
            about = {"namespace": "lab", "uid": f"uid-{len(self.objects)}", "creationTimestamp": "2026-11-21T09:00:00Z"}
            self.objects[path] = body | {"metadata": body["metadata"] | about}
        elif path not in self.objects:
            return self._failure(404, f"{path} not found")
        elif request.method == "DELETE":
            return web.json_response(self.objects.pop(path))
        else:
            assert request.content_type == "application/merge-patch+json"
            found = self.objects[path]
            self.objects[path] = found | {"spec": found["spec"] | body["spec"]}
        return web.json_response(self.objects[path])

    @staticmethod
    def _selected(request: web.Request, item: Object) -> bool:
        wanted = filter(None, request.query.get("labelSelector", "").split(","))
        labels = item["metadata"].get("labels", {})
        name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        if "=" not in name and name not in ("", item["metadata"]["name"]):
            return False
        return all(labels.get(label) == value for label, _, value in (each.partition("=") for each in wanted))

    def _review(self, path: str, body: Object) -> Object:
        spec = body["spec"]
        self.reviews.append(body)
        if path.endswith("/tokenreviews"):
            name = self.users.get(spec["token"])
            user = {"username": name, "uid": "1", "groups": ["system:authenticated"], "extra": {"k": ["v"]}}
            return {"status": {"authenticated": True, "user": user} if name else {"error": "unknown"}}
        asked = spec["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return {"status": {"allowed": (spec["user"], asked["verb"], resource) in self.rights}}

    @staticmethod
    def _failure(code: int, message: str) -> web.Response:
        body = {"kind": "Status", "status": "Failure", "message": message, "code": code}
        return web.Response(status=code, text=json.dumps(body), content_type="application/json")
