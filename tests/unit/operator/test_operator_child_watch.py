"""The list and watch of a job's children, against an API server that misbehaves: over real connections."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes

from dovetail.kube import connection
from dovetail.kube.resources import POD
from dovetail.operator.cluster import child_watch
from dovetail.operator.cluster.child_watch import follow
from dovetail.operator.cluster.client import Client
from helpers.patience import PATIENCE


def pod(name, version):
    return {"kind": "Pod", "metadata": {"name": name, "namespace": "a", "resourceVersion": str(version)}}


def event(kind, thing):
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


class Server:
    """Pods of one namespace. `plays` says what each watch does: a list of lines to send, then what comes at the end:
    `end` (as servers do after some minutes), `cut` (within a line), `hang`, or a number: the status of the answer."""

    def __init__(self, plays, lists=()):
        self.plays = list(plays)
        self.lists = list(lists)
        self.asked = []  # `list`, or the version that a watch goes on from

    async def answer(self, request):
        if "watch" not in request.query:
            self.asked.append("list")
            found = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
            if found is None:
                return web.json_response({"message": "not found"}, status=404)
            version, items = found
            return web.json_response({"metadata": {"resourceVersion": version}, "items": items})
        assert request.query["allowWatchBookmarks"] == "true"
        self.asked.append(request.query["resourceVersion"])
        lines, end = self.plays.pop(0) if self.plays else ([], "hang")
        if isinstance(end, int):
            return web.json_response({"message": "refused"}, status=end)
        reply = web.StreamResponse()
        await reply.prepare(request)
        for line in lines:
            await reply.write(line)
        if end == "cut":
            request.transport.abort()
        elif end == "hang":
            await asyncio.sleep(3600)
        return reply


class Listener:
    """Keeps what it is told, as the controller does."""

    def __init__(self, client):
        self.client = client
        self.heard = []
        self.known = set()

    async def relist(self, resource, namespace):
        found, version = set(), None
        try:
            async for page in self.client.pages(resource, namespace, "x=y"):
                version = page.version
                found |= {item["metadata"]["name"] for item in page.items}
        except Exception as error:
            if getattr(error, "status", 0) != 404:
                raise
        self.known = found
        return version

    async def observe(self, thing, deleted):
        self.heard.append((thing["metadata"]["name"], deleted))
        (self.known.discard if deleted else self.known.add)(thing["metadata"]["name"])


@asynccontextmanager
async def following(server):
    """Yields the listener and what was said of the kind."""
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/a/pods", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    settings = kubernetes.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    api = kubernetes.ApiClient(settings)
    client, there = Client(api), []
    listener = Listener(client)

    async def listed(found):
        there.append(found)

    task = asyncio.create_task(follow(client, POD, "a", "x=y", listener, listed, reconnect=0.01))
    try:
        yield listener, there
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        await runner.cleanup()


async def until(true):
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


FIRST = ("10", [pod("one", 3), pod("two", 10)])


def check(server, true, expected):
    async def play():
        async with following(server) as (listener, there):
            await until(lambda: true(listener, there))
            assert expected(listener, there), (listener.heard, listener.known, server.asked, there)

    asyncio.run(play())


@pytest.mark.parametrize("end", ["end", "cut", 500, 429])
def test_after_a_break_the_watch_goes_on_where_it_was(end):
    plays = [
        ([event("ADDED", pod("three", 11))], end if isinstance(end, str) else "end"),
        ([event("BOOKMARK", pod("", 20))], "end"),
        ([], end if isinstance(end, int) else "end"),
        ([event("DELETED", pod("one", 21))], "hang"),
    ]
    server = Server(plays, [FIRST])
    check(
        server,
        lambda listener, _: ("one", True) in listener.heard,
        lambda listener, _: listener.known == {"two", "three"} and server.asked == ["list", "10", "11", "20", "20"],
    )


def test_a_broken_line_is_not_taken_and_nothing_is_lost():
    whole = event("ADDED", pod("three", 11))
    server = Server([([whole[:40]], "cut"), ([whole[:40], whole[40:]], "hang")], [FIRST])
    check(
        server,
        lambda listener, _: listener.heard,
        lambda listener, _: listener.heard == [("three", False)] and server.asked == ["list", "10", "10"],
    )


@pytest.mark.parametrize("how", ["status", "event"])
def test_a_version_that_the_server_forgot_means_a_new_list(how):
    gone = ([], 410) if how == "status" else ([event("ERROR", {"code": 410, "message": "too old"})], "end")
    server = Server([gone, ([], "hang")], [FIRST, ("30", [pod("two", 25)])])
    check(
        server,
        lambda *_: server.asked[-1:] == ["30"],
        lambda listener, _: listener.known == {"two"} and server.asked == ["list", "10", "list", "30"],
    )


def test_a_watch_that_says_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.2)
    server = Server([([], "hang"), ([event("ADDED", pod("three", 11))], "hang")], [FIRST])
    check(
        server,
        lambda listener, _: listener.heard,
        lambda listener, _: server.asked[:3] == ["list", "10", "10"],
    )


def test_a_kind_may_come_and_go(monkeypatch):
    monkeypatch.setattr(child_watch, "MISSING_SECONDS", 0.01)
    server = Server([([], 404), ([], "hang")], [None, FIRST, None, ("40", [])])
    check(
        server,
        lambda _, there: len(there) == 4,
        lambda listener, there: there == [False, True, False, True] and listener.known == set(),
    )


def test_a_large_object_comes_in_parts():
    large = pod("large", 11) | {"data": "x" * 3_000_000}
    server = Server([([event("ADDED", large) + event("ADDED", pod("next", 12))], "hang")], [FIRST])
    check(
        server,
        lambda listener, _: len(listener.heard) == 2,
        lambda listener, _: listener.heard == [("large", False), ("next", False)],
    )
